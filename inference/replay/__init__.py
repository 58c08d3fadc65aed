"""Replay: what a policy would have cost on coupled traces, without a model in the loop.

Read first: coupled.py, then walk.py and thresholds.py. asking.py replays policies that are not threshold rules.
"""
