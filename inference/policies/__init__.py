"""Policies by name: `none`, `fixed:K`, `head:PATH:THRESHOLD`."""

from __future__ import annotations

from accept_head.errors import InputError
from accept_head.hub import load_head
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair, hidden_size

__all__ = ["FixedPolicy", "HeadPolicy", "make_policy"]


def make_policy(spec: str, pair: Pair) -> DraftPolicy:
    """Build a policy from its SPEC. Raises InputError naming the part that is wrong."""
    name, _, rest = spec.partition(":")
    if name == "none" and not rest:
        return FixedPolicy(0)
    if name == "fixed" and rest.isdecimal():
        return FixedPolicy(int(rest))
    if name == "head" and rest:
        path, _, threshold = rest.rpartition(":")
        try:
            value = float(threshold)
        except ValueError:
            path = ""
        if not path:
            raise InputError(f"policy {spec!r}: expected head:PATH:THRESHOLD, with a threshold from 0 to 1")
        head = load_head(path, hidden_size=hidden_size(pair.draft), device=pair.draft.device)
        return HeadPolicy(head, value)
    raise InputError(f"policy {spec!r}: expected none, fixed:K or head:PATH:THRESHOLD")
