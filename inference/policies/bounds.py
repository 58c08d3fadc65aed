"""k_min and k_max: the fewest tokens after which a policy may stop, and the most it drafts."""

from __future__ import annotations

from accept_head.errors import InputError


def check_bounds(policy: str, k_min: int, k_max: int) -> None:
    """Raises InputError naming the policy and both values."""
    if not 1 <= k_min <= k_max:
        raise InputError(f"{policy} bounds are k_min {k_min} and k_max {k_max}, expected 1 <= k_min <= k_max")
