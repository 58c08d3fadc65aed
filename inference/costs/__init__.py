"""The costs of forwards: files of measured seconds, costs learnt from the rounds that are served, what a decode loop
spends time on, and tables from batch size to draft length.

Read first: learnt.py.
"""
