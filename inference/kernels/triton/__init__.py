"""The kernels themselves. `launch.triton_kernels` imports them when one is first launched, as Triton may be missing.

Read first: signals.py.
"""
