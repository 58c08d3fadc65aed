"""Measuring what forwards and rounds cost on this machine.

Read first: rounds.py.
"""
