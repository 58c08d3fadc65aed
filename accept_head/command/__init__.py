"""What the command line does around a verb: options, config files, quiet libraries, and how a process starts and ends.

Read `../cli.py` first, the front door, which uses all of it; then `options.py`.
"""
