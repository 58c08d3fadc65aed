"""A head as a folder and as a repository on the Hub: where it is found, its stored form, its card, publishing it.

Read `folder.py` first: the files that a head consists of, and how a name becomes a folder.
"""
