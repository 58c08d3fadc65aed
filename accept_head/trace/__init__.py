"""Coupled traces: what collect writes, and what training, tuning and replay read.

Read `columns.py` first (one record), then `config.py` (how a folder of them was made), then `shards.py` (the files).
"""
