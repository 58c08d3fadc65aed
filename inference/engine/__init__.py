"""Runs a model fast: a cache in which every row has its own length, attention on it, CUDA graphs, a memory plan.

Read first: cache.py.
"""
