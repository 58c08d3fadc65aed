"""Policies by name. A SPEC is `name`, `name:ARGUMENT` or `name:ARGUMENT,option=value,…`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.hub import load_head
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.svip import SvipPolicy
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair, hidden_size

__all__ = [
    "POLICIES",
    "AdaEdlPolicy",
    "ConfidencePolicy",
    "CumulativeConfidencePolicy",
    "EntropyPolicy",
    "FixedPolicy",
    "HeadPolicy",
    "MaxProbPolicy",
    "MeanMaxProbPolicy",
    "SvipPolicy",
    "make_policy",
]

Options = dict[str, Any]


class Entry(NamedTuple):
    """form: the SPEC. line: what it does. options: a callable whose keyword arguments the SPEC may name."""

    form: str
    line: str
    build: Callable[[str, PreTrainedModel, Options], DraftPolicy]
    options: Callable[..., DraftPolicy]


def make_policy(spec: str, draft: Pair | PreTrainedModel) -> DraftPolicy:
    """Build a policy for a draft (or its pair) from its SPEC. Raises InputError naming the part that is wrong."""
    model = draft.draft if isinstance(draft, Pair) else draft
    text, *pairs = spec.split(",")
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy {spec!r}: unknown, expected one of {', '.join(e.form for e in POLICIES.values())}")
    entry = POLICIES[name]
    options = _parse_options(spec, pairs, entry)
    try:
        return entry.build(argument, model, options)
    except _Malformed:
        raise InputError(f"policy {spec!r}: expected {entry.form}") from None


def _parse_options(spec: str, pairs: list[str], entry: Entry) -> Options:
    known = {p.name for p in inspect.signature(entry.options).parameters.values() if p.kind is p.KEYWORD_ONLY}
    options: Options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise InputError(f"policy {spec!r}: unknown option {key!r}, expected one of {sorted(known) or 'none'}")
        if not value.isdecimal():
            raise InputError(f"policy {spec!r}: option {key} is {value!r}, expected an integer")
        options[key] = int(value)
    return options


class _Malformed(Exception):
    """The argument is not of the entry's form."""


def _none(argument: str, draft: PreTrainedModel, options: Options) -> DraftPolicy:
    if argument:
        raise _Malformed
    return FixedPolicy(0)


def _fixed(argument: str, draft: PreTrainedModel, options: Options) -> DraftPolicy:
    if not argument.isdecimal():
        raise _Malformed
    return FixedPolicy(int(argument))


def _rule(policy: Callable[..., DraftPolicy]) -> Callable[[str, PreTrainedModel, Options], DraftPolicy]:
    """A rule with one number, which has a default."""

    def build(argument: str, draft: PreTrainedModel, options: Options) -> DraftPolicy:
        return policy(_number(argument), **options) if argument else policy(**options)

    return build


def _head(argument: str, draft: PreTrainedModel, options: Options) -> DraftPolicy:
    """PATH:THRESHOLD, or PATH alone: threshold, bounds and lag are then those of its decoding.json."""
    path, _, last = argument.rpartition(":")
    if path and _is_number(last):
        threshold: float = _number(last)
    elif argument:
        path = argument
        decoding = _decoding(Path(path))
        threshold = decoding.pop("threshold")
        options = decoding | options
    else:
        raise _Malformed
    head = load_head(path, hidden_size=hidden_size(draft), device=draft.device)
    return HeadPolicy(head, threshold, **options)


def _decoding(folder: Path) -> Options:
    """What `accept-head tune` chose for this head."""
    path = folder / "decoding.json"
    if not path.is_file():
        raise InputError(f"{folder} has no decoding.json (accept-head tune writes it): give a threshold, head:PATH:0.5")
    values = read_json(path)
    if type(values.get("threshold")) not in (float, int):
        raise InputError(f"{path}: field 'threshold' is {values.get('threshold')!r}, expected a number")
    chosen = {key: values[key] for key in ("threshold", "k_min", "k_max", "lag") if values.get(key) is not None}
    for key, value in chosen.items():
        if key != "threshold" and type(value) is not int:
            raise InputError(f"{path}: field {key!r} is {value!r}, expected an integer")
    return chosen


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    if not _is_number(text):
        raise _Malformed
    return float(text)


POLICIES = {
    "none": Entry("none", "no drafting: the target alone", _none, lambda: FixedPolicy(0)),
    "fixed": Entry("fixed:K", "K draft tokens every round", _fixed, lambda k: FixedPolicy(k)),
    **{
        name: Entry(f"{name}[:{number}]", line, _rule(policy), policy)
        for name, number, line, policy in (
            ("confidence", "THRESHOLD", "stop after a token that the draft gave less than this", ConfidencePolicy),
            (
                "cumulative-confidence",
                "THRESHOLD",
                "LLMCad: stop when all drawn tokens together had less than this",
                CumulativeConfidencePolicy,
            ),
            ("max-prob", "THRESHOLD", "Kangaroo, p-min: stop after a token where max q was less", MaxProbPolicy),
            (
                "max-prob-mean",
                "THRESHOLD",
                "vLLM's RFC: stop all rows when their mean max q is less",
                MeanMaxProbPolicy,
            ),
            ("entropy", "NATS", "stop after a token whose distribution had more entropy than this", EntropyPolicy),
            ("svip", "THRESHOLD", "SVIP: the same on the scale of its authors", SvipPolicy),
            ("adaedl", "LAMBDA", "AdaEDL: do not draw where a bound by entropy is below a moving level", AdaEdlPolicy),
        )
    },
    "head": Entry(
        "head:PATH[:THRESHOLD]",
        "SpecDec++: stop when the predicted chance of a rejection so far passes the threshold",
        _head,
        HeadPolicy,
    ),
}
