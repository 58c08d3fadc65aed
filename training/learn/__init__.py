"""Traces become a head: data, the training step, and what a run leaves.

Read first: run.py, then module.py.
"""
