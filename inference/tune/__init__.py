"""What `accept-head tune` tries, and what it chooses by.

Read first: rules.py.
"""
