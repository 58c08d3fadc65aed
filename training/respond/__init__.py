"""Sources of the target's responses other than our own loop: vLLM, a server, or existing traces.

Read `responder.py` first (the interface), then `backends.py` (the choice by the settings).
"""
