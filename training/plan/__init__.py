"""The cost of a run, estimated from shapes and counts alone.

Read `estimate.py` first. The dry runs of the verbs are in `../collect/dry_run.py` and `../learn/dry_run.py`.
"""
