"""The captured steps of a decode loop, kept from run to run, for each policy its own.

A graph has in it whatever its function read of Python. Between two runs all of that can have changed: here it is
compared, and what does not fit any more is captured anew.

- Sampling, vocabulary, end tokens and the verifier are in all steps: if one is another, everything goes.
- Steps that ask no policy are everybody's. The seed is in those that use random numbers: these alone are captured
  again.
- A policy's own steps are those of the very object, as long as its attributes are the very objects they were, but for
  those that its `capture` names, which go in and out. When the policy is gone, so are its graphs.

One policy runs at a time. Hence what their steps return lies in the same memory, and more policies take no more of it.
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

DRAWS: dict[Verifier, tuple[str, ...]] = {"ratio": ("random",), "match": ("random", "test")}  # with random numbers


@dataclass(frozen=True)
class SharedSettings:
    """What the steps of all policies read. stopping: of the first run with them, whose tensor of end tokens is in the
    graphs."""

    sampling: Sampling
    vocab_size: int
    end_ids: tuple[int, ...]
    verifier: Verifier
    stopping: Stopping = field(compare=False)


class CapturedSteps:
    """By policy. backend: None where nothing is captured. also: graphs of the forwards."""

    def __init__(self, backend: GraphBackend | None, also: Sequence[Graphs]):
        self.backend, self.also = backend, also
        self.free()

    def free(self) -> None:
        """Give all memory back: the rows have moved, say."""
        self.settings: SharedSettings | None = None
        self.seed: int | None = None
        self.policies: dict[int, _OfPolicy] = {}
        self.shared = Graphs(self.backend, self.also) if self.backend else None

    def shared_by_all(
        self, processing: Processing, stopping: Stopping, verifier: Verifier, seed: int
    ) -> tuple[Graphs, Stopping]:
        """Graphs of a run for the steps that ask no policy; and what says which tokens end a text, the same ones as
        `stopping` does. processing: a `plain` one."""
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
        """Graphs of a run for the steps that ask this policy, which `policy.start` has begun; after `shared_by_all`."""
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
    """The attributes that steps may read as they are: all but those that go in and out, or are not read."""
    capture = capture_of(policy)
    named = () if capture is None else (*capture.carried, *capture.read, *capture.unread)
    read = {name: value for name, value in vars(policy).items() if name not in named}
    for held in [name for name, value in read.items() if capture_of(value) is not None]:  # a policy in it
        read |= {name: value for each, value in vars(read[held]).items() if (name := f"{held}.{each}") not in named}
    return read
