"""The decode loop: draft, verify and accept, with each row at its own length.

Read first: loop.py.
"""
