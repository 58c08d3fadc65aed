"""Attention on the ragged cache: which positions a query may see, and which kernel reads them.

Read first: kinds.py, then choice.py.
"""
