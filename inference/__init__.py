"""How a head is used: policies, the decode loop, and what they gain."""

if __name__ != "accept_head.inference":
    raise ImportError("import this package as accept_head.inference: the folder is only where its source lives")

from accept_head.inference.generation import Generated, generate
from accept_head.inference.policies import make_policy
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, Signal, VerifyOutcome
from accept_head.inference.rows import DecodeStats

__all__ = [
    "DecodeStats",
    "DraftPolicy",
    "DraftStep",
    "Generated",
    "RowPolicy",
    "Signal",
    "VerifyOutcome",
    "generate",
    "make_policy",
]
