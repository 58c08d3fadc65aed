"""The acceptance prediction head, as it is trained and as it serves.

Read `../head_config.py` first (what a head is), then `network.py` (the head itself), then `scorer.py` (how it serves).
"""
