"""The kernels themselves. Imported only where Triton is.

Read first: signals.py.
"""
