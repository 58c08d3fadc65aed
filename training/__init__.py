"""How a head is made: prompts become responses, responses become coupled traces, traces become a trained head.

Read `collect/` first, then `learn/`. `respond/` generates the responses, and `plan/` estimates the cost of a run.
"""

if __name__ != "accept_head.training":
    raise ImportError("import this package as accept_head.training: the folder is only where its source lives")
