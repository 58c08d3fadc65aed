"""Operations of a round that run as a few Triton kernels on a GPU, and in torch elsewhere.

Each module is one operation: the function to call, the torch reference and the launch of its kernels. usable.py chooses
between the reference and the kernels. Read first: usable.py, then signals.py.
"""
