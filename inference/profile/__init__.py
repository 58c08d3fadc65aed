"""Measuring what forwards and rounds cost on this machine.

Read first: regression.py. The batch map is rounds.py, then batch_map.py.
"""
