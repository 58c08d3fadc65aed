"""A policy's name and options on the command line, declared at its class: `@named("max-prob", "[THRESHOLD]", "…")`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from transformers import PreTrainedModel

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.head.origin import Checkpoint
from accept_head.inference.costs.files import forward_costs, pair_costs
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair, hidden_size, input_embeddings

Options = dict[str, Any]


class DraftShape(NamedTuple):
    """What a policy must know of a draft, for hosts whose model is not a transformers model. hidden_size: channels of
    its last hidden state. embeddings: (vocab, hidden_size) input embeddings, for heads that read them. checkpoint,
    dtype: compared with those that a head was trained on; None if unknown."""

    hidden_size: int
    device: torch.device
    embeddings: torch.Tensor | None = None
    checkpoint: Checkpoint | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, draft: Pair | PreTrainedModel | DraftShape) -> DraftShape:
        if isinstance(draft, DraftShape):
            return draft
        model = draft.draft if isinstance(draft, Pair) else draft
        dtype = str(model.dtype).removeprefix("torch.")
        known = model.get_input_embeddings() is not None  # an EAGLE-3 drafter may have those of its target alone
        embeddings = input_embeddings(model) if known else None
        return cls(hidden_size(model), model.device, embeddings, Checkpoint.of(model), dtype)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How `tune` tries a policy that keeps state. param: the tuned option of the SPEC, or else its argument. values: to
    try. argument: the SPEC's argument when an option is tuned. by_row: a row does not depend on other rows, so that all
    responses can be replayed together."""

    param: str
    values: Sequence[float]
    argument: str = ""
    by_row: bool = False


@dataclass(frozen=True)
class Spec:
    """An entry of the registry. argument: its name in the form name:ARGUMENT; in brackets if optional, "" if there is
    none. line: what the policy does. policy: the class, whose keyword-only parameters are the options. read: turns the
    argument into the policy's first parameter. build: if given, makes the policy from (argument, draft, options)
    instead."""

    name: str
    argument: str
    line: str
    policy: type[Any]
    read: Callable[[str], Any]
    build: Callable[[str, DraftShape, Options], DraftPolicy] | None = None
    tuning: Tuning | None = None

    @property
    def form(self) -> str:
        """The SPEC as a user writes it."""
        if self.argument.startswith("["):
            return f"{self.name}[:{self.argument[1:-1]}]"
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def takes_costs(self) -> bool:
        """Whether the option `costs` is allowed. It is not if the argument gives costs, or if nothing is drafted."""
        return self.name != "none" and "COSTS" not in self.argument

    @property
    def option_types(self) -> dict[str, type]:
        """The type of each option: int, float, bool, or str for a choice of words, which the policy checks."""
        hints = get_type_hints(self.policy.__init__)
        # `int | None` counts as int.
        return {name: next((k for k in (bool, int, float) if _allows(hints[name], k)), str) for name in self.defaults}

    @property
    def defaults(self) -> Options:
        """The options with their defaults."""
        parameters = inspect.signature(self.policy).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def make(self, argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
        """Build the policy. Raises Malformed when the argument does not fit the form, InputError for a wrong value."""
        if self.build is not None:
            return self.build(argument, draft, options)
        if bool(argument) != bool(self.argument) and not self.argument.startswith("["):
            raise Malformed
        made: DraftPolicy = self.policy(self.read(argument), **options) if argument else self.policy(**options)
        return made


POLICIES: dict[str, Spec] = {}  # registry.py fills it
Class = TypeVar("Class", bound=type[Any])


class Malformed(Exception):
    """The argument does not fit the policy's form."""


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def head_parts(argument: str) -> tuple[str, str]:
    """PATH[:THRESHOLD] → path and threshold, "" without a threshold."""
    path, _, last = argument.rpartition(":")
    return (path, last) if path and is_number(last) else (argument, "")


def is_integer(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


def number(text: str) -> float:
    if not is_number(text):
        raise Malformed
    return float(text)


def integer(text: str) -> int:
    if not is_integer(text):
        raise Malformed
    return int(text)


def costs(text: str) -> PairCosts | LearntCosts:
    """Costs learnt while serving, from a file that `accept-head profile` wrote, or from c = t_draft / t_target for any
    number of rows."""
    if text == "auto":
        return LearntCosts()
    if text and not is_number(text):
        return pair_costs(Path(text))
    if not text or not 0 < float(text) < float("inf"):
        raise InputError(f"costs is {text or 'empty'}, expected auto, a file, or t_draft / t_target > 0")
    return PairCosts.constant(ForwardCosts(t_draft=float(text), t_target=1.0))


def cost_ratio(text: str) -> float:
    """c = t_draft / t_target, as a number or from a file."""
    return float(text) if is_number(text) else forward_costs(Path(text)).ratio


def named(
    name: str,
    argument: str,
    line: str,
    read: Callable[[str], Any] = number,
    *,
    build: Callable[[str, DraftShape, Options], DraftPolicy] | None = None,
    tuning: Tuning | None = None,
) -> Callable[[Class], Class]:
    """Registers a policy's class under a name; see `Spec`."""

    def name_class(policy: Class) -> Class:
        POLICIES[name] = Spec(name, argument, line, policy, read, build, tuning)
        return policy

    return name_class


def _allows(hint: Any, kind: type) -> bool:
    return hint is kind or kind in getattr(hint, "__args__", ())
