"""What a CUDA graph has to know of a policy that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Of a policy whose start_round, draw_next and keep_drafting are functions of tensors alone: they wait for nothing,
    and all that they read stays as it is and where it is, but for these attributes. `held.name` is an attribute of an
    object that the policy holds.

    carried: start_round makes them anew, draw_next and keep_drafting change them. read: these three only read them;
    observe, admit and select bind them to other tensors between rounds. unread: these three do not read them, others
    bind them to other objects. learnt: tensors that `observe` changes in place, if it, too, is such a function of the
    outcome and of what is carried; None: it is called as it is, and told the seconds.
    """

    carried: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    learnt: tuple[Tensor, ...] | None = None


class Captured(Protocol):
    """A policy that graphs may hold. One without `capture`, or whose capture is None, is called as it is."""

    @property
    def capture(self) -> Capture | None: ...

    def forget(self) -> None:
        """Be as if new, in the same memory. Only for policies that learn."""
        ...


def capture_of(policy: object) -> Capture | None:
    found: Capture | None = getattr(policy, "capture", None)
    return found
