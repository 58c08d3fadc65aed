"""What a policy is made of, in one number: two with the same do the same, whatever files their SPECs named."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from typing import Any

from accept_head.files import sha256
from accept_head.inference.policy import DraftPolicy


def content_hash(policy: DraftPolicy) -> str:
    """Of a new policy's numbers, of its costs or table and, if it has one, of its head's weights."""
    held = {name: repr(value) for name, value in sorted(vars(policy).items()) if _says_something(value)}
    head = getattr(policy, "head", None)
    weights = [] if head is None else [sha256(tensor.cpu().numpy().tobytes()) for tensor in head.state_dict().values()]
    return sha256(json.dumps([type(policy).__name__, held, weights]))


def _says_something(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple) or is_dataclass(value)
