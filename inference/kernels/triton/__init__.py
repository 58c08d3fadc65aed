"""The Triton kernels. `launch.triton_kernels` imports a module at its first launch, because Triton may be missing.

Read first: signals.py.
"""
