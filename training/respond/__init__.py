"""Who says the responses: transformers, vLLM, a server, or traces that are there already.

Read first: responders.py.
"""
