"""How a head is made: prompts become responses, responses become coupled traces, traces become a trained head.

Read `collect/` first, then `learn/`; `respond/` is what says the responses, `plan/` what a run would cost.
"""

if __name__ != "accept_head.training":
    raise ImportError("import this package as accept_head.training: the folder is only where its source lives")
