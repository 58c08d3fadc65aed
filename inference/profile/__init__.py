"""Measures the costs of forwards and rounds on this machine.

Read first: regression.py. The batch map is rounds.py, then batch_map.py.
"""
