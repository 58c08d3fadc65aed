"""Running a model fast: a cache in which every row has its own length, attention on it, CUDA graphs, memory.

Read first: cache.py.
"""
