"""Policies that learn from verification while they serve.

Read first: recalibration.py.
"""
