"""Prompts become responses, and responses become coupled traces.

Read first: verb.py, then score.py.
"""
