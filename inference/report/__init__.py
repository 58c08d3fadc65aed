"""One HTML page, and PNGs, of what every policy costs and of single rounds.

Read first: data.py, then build.py, which fills it, and page.py, which shows it.
"""
