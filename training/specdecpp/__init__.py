"""What the SpecDec++ research code (Kaffaljidhmah2/SpecDec_pp) leaves, as a head or as traces of ours.

Read `verb.py` first (`accept-head import-specdecpp`); `checkpoint.py` and `records.py` read their two kinds of files.
"""
