"""The costs of forwards: files of measured seconds, and tables from batch size to draft length.

Read first: files.py.
"""
