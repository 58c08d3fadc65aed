"""EAGLE-3 drafters: one decoder layer on the target's states. Read network.py first; saved.py has its files, unroll.py
what it would draft from every position of a text."""
