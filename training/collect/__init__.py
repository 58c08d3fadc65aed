"""Prompts become responses, and responses become coupled traces.

Read `verb.py` first (`accept-head collect`), then `collector.py` (a run), `decoding.py` (our loop answers and
scores at once), `score.py` (the coupling).
"""
