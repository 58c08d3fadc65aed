"""The captured steps of a decode loop, kept from run to run, with separate graphs for each policy.

A graph contains every Python value that its function read. These values can change between two runs. They are compared
here, and a graph that no longer fits is captured anew.

- All steps depend on sampling, vocabulary, end tokens and the verifier: if one of them changes, all graphs are freed.
- Steps that ask no policy are shared by all policies. Those that use random numbers depend on the seed: only they are
  captured again when it changes.
- A policy's steps are kept while it is the same object with the same objects as attributes. Attributes that its
  `capture` names are excepted: they are inputs and outputs. When the policy is deleted, so are its graphs.

One policy runs at a time. So the outputs of all policies share memory, and more policies take no more of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.engine.cuda import GraphBackend
from accept_head.inference.engine.graphs import Graphs
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.sampling import Sampling

DRAWS: dict[Verifier, tuple[str, ...]] = {"ratio": ("random",), "match": ("random", "test")}  # that use random numbers


@dataclass(frozen=True)
class SharedSettings:
    """Settings that the steps of all policies read. stopping: of the first run with these settings; its tensor of end
    tokens is in the graphs."""

    sampling: Sampling
    vocab_size: int
    end_ids: tuple[int, ...]
    verifier: Verifier
    stopping: Stopping = field(compare=False)


class CapturedSteps:
    """Captured steps, by policy. backend: None = capture nothing. also: graphs of the forwards."""

    def __init__(self, backend: GraphBackend | None, also: Sequence[Graphs]):
        self.backend, self.also = backend, also
        self.free()

    def free(self) -> None:
        """Drop all graphs and release their memory, for example when new rows are allocated."""
        self.settings: SharedSettings | None = None
        self.seed: int | None = None
        self.policies: dict[int, _OfPolicy] = {}
        self.shared = Graphs(self.backend, self.also) if self.backend else None

    def shared_by_all(
        self, processing: Processing, stopping: Stopping, verifier: Verifier, seed: int
    ) -> tuple[Graphs, Stopping]:
        """Graphs for the steps of a run that ask no policy, and the Stopping that these steps must use; it has the same
        end tokens as `stopping`. processing: must be `plain`."""
        ends = tuple(stopping.end_ids.tolist())
        settings = SharedSettings(processing.sampling, processing.vocab_size, ends, verifier, stopping)
        if settings != self.settings:
            self.free()
            self.settings = settings
        assert self.settings is not None and self.shared is not None
        if self.seed != seed and not processing.greedy:
            self.shared.forget(*DRAWS[verifier])
            self.seed = seed
        return self.shared, self.settings.stopping

    def of(self, policy: DraftPolicy) -> Graphs:
        """Graphs for the steps of a run that ask this policy. Call it after `policy.start` and `shared_by_all`."""
        assert self.shared is not None and self.backend is not None
        self.policies = {key: each for key, each in self.policies.items() if each.policy() is not None}
        known = self.policies.get(id(policy))
        if known is None or not known.fits(policy):
            graphs = Graphs(self.backend, self.also, beside=self.shared)
            known = self.policies[id(policy)] = _OfPolicy(weakref.ref(policy), read_by_steps(policy), graphs)
        return known.graphs


@dataclass
class _OfPolicy:
    policy: weakref.ref[DraftPolicy]
    read: dict[str, Any]
    graphs: Graphs

    def fits(self, policy: DraftPolicy) -> bool:
        now = read_by_steps(policy)
        return now.keys() == self.read.keys() and all(value is self.read[name] for name, value in now.items())


def read_by_steps(policy: DraftPolicy) -> dict[str, Any]:
    """The attributes whose values are fixed in a captured graph: all that `capture` does not name."""
    capture = capture_of(policy)
    named = () if capture is None else (*capture.carried, *capture.read, *capture.unread)
    read = {name: value for name, value in vars(policy).items() if name not in named}
    for held in [name for name, value in read.items() if capture_of(value) is not None]:  # a wrapped policy
        read |= {name: value for each, value in vars(read[held]).items() if (name := f"{held}.{each}") not in named}
    return read
