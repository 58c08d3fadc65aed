"""Stopping policies, one rule a file. Each class says how it is named; `registry` finds them: a new one is a new file.

Read first: ../policy.py, then threshold.py and head.py.
"""
