"""Stopping policies, one rule a file. Each class declares its name, `registry` finds it: a new policy is a new file.

Read first: ../policy.py, then threshold.py and head.py.
"""
