"""The settings that `accept-head tune` tries, and its objectives.

Read first: rules.py.
"""
