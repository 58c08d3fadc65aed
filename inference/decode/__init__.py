"""The decode loop: draft, verify, accept, for rows that each keep their own pace.

Read first: loop.py.
"""
