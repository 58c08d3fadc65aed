"""Policies that learn from verification while serving.

Read first: recalibration.py.
"""
