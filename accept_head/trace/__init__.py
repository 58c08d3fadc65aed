"""Coupled traces: collect writes them, and training, tuning and replay read them.

Read `columns.py` first (one record), then `config.py` (how a folder of them was made), then `shards.py` (the files).
"""
