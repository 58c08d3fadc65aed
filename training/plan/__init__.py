"""What a run would do and cost, said beforehand.

Read first: dry_run.py.
"""
