"""Import of the files of the SpecDec++ research code (Kaffaljidhmah2/SpecDec_pp), as a head or as traces.

Read `verb.py` first (`accept-head import-specdecpp`). `checkpoint.py` and `records.py` read the two kinds of files.
"""
