"""Policies side by side in wall clock: cells of batch size and temperature, or the arrivals of a trace.

Read first: cells.py.
"""
