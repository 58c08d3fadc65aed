"""`accept-head fit`: from a pair of models to a verdict, by the library functions of the other verbs.

Read first: verb.py. Like cli.py, this room may import training and inference.
"""
