"""A head as a folder and as a repository on the Hub: finding it, its stored form, its card, publishing it.

Read `folder.py` first: the files of a head, and how a name becomes a folder.
"""
