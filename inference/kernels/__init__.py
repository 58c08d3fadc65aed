"""Triton kernels for a round's small work, each beside the torch that says what it computes.

Read first: signals.py.
"""
