"""Traces become a head: data, the training step, and the files that a run writes.

Read `run.py` first (a run from settings to saved heads), then `module.py` (the training step) and `gradient.py`.
"""
