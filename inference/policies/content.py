"""A hash of a policy's content: policies with equal hashes act alike, whatever files their SPECs name."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from typing import Any

from accept_head.files import sha256
from accept_head.inference.policy import DraftPolicy


def content_hash(policy: DraftPolicy) -> str:
    """Hash of a new policy's numbers, its costs or table, and the weights of its head if it has one."""
    held = {name: repr(value) for name, value in sorted(vars(policy).items()) if _says_something(value)}
    head = getattr(policy, "head", None)
    weights = [] if head is None else [sha256(tensor.cpu().numpy().tobytes()) for tensor in head.state_dict().values()]
    return sha256(json.dumps([type(policy).__name__, held, weights]))


def _says_something(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple) or is_dataclass(value)
