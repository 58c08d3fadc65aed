"""What the command line does around a verb: options, config files, quiet libraries, and how a process starts and ends.

Read `../cli.py` first, which uses all of these modules, then `options.py`.
"""
