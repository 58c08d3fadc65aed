"""What a policy would have cost on coupled traces, without a model in the loop.

Read first: coupled.py, then arrays.py.
"""
