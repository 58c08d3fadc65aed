"""Prompts become responses, and responses become coupled traces.

Read `verb.py` first (`accept-head collect`), then `collector.py` (a run), then `score.py` (the coupling).
"""
