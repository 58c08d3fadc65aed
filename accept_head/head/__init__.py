"""The acceptance prediction head, for training and for serving.

Read `../head_config.py` first (what a head is), then `network.py` (the head itself), then `scorer.py` (how it serves).
"""
