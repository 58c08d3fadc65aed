"""A report as one HTML page and PNGs: the costs of every policy, and single rounds.

Read first: data.py, then build.py, which makes the data, and page.py, which shows it.
"""
