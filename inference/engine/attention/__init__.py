"""Attention on the ragged cache: the positions that a query may see, and the kernels that read them.

Read first: kinds.py, then choice.py.
"""
