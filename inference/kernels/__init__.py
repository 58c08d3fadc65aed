"""Operations of a round that are a few Triton kernels on a GPU, and torch elsewhere.

Each module is one operation: the function to call, the torch reference and the launch of its kernels. usable.py decides
between the two. Read first: usable.py, then signals.py.
"""
