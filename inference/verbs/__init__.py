"""The verbs of the command line that use a head: each parses, calls a library and prints.

Read first: generate.py.
"""
