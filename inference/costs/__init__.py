"""What a forward costs: files of measured seconds, and tables from batch size to draft length.

Read first: files.py.
"""
