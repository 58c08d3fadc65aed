"""What says the responses: transformers, vLLM, a server, or traces that are there already.

Read `responder.py` first (what each of them gives), then `backends.py` (which one the settings ask for).
"""
