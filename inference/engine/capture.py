"""What a CUDA graph must know of a policy that it contains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The changing attributes of a policy that graphs may contain. Its start_round, draw_next and keep_drafting must be
    functions of tensors alone, without a sync. All other attributes that they read keep their address, and their value,
    but for tensors that change in place, as learnt costs do. `held.name` is an attribute of an object that the policy
    holds.

    carried: start_round makes them anew; draw_next and keep_drafting change them. read: these three methods only read
    them; observe, admit and select bind them to other tensors between rounds. unread: these three methods do not read
    them; others rebind them.
    """

    carried: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def capture_of(policy: object) -> Capture | None:
    """None for a policy that graphs must not contain."""
    found: Capture | None = getattr(policy, "capture", None)
    return found
