"""Policies by name. A SPEC is `name`, `name:ARGUMENT` or `name:ARGUMENT,option=value,…`.

The option `costs` is of all policies that draft and do not know costs by themselves: it wraps them (BatchStopPolicy).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from transformers import PreTrainedModel

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.depth_calibration import DepthCalibration
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.head import AcceptanceHead
from accept_head.head_folder import head_folder
from accept_head.head_use import Checkpoint, HeadOrigin
from accept_head.hub import load_head
from accept_head.inference.costs.batch_table import read_batch_table
from accept_head.inference.costs.files import forward_costs, pair_costs
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.batch_stop import OURS, Host
from accept_head.inference.policies.batch_stop_device import batch_stop
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy
from accept_head.inference.policies.svip import SvipPolicy
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair, hidden_size, input_embeddings

Options = dict[str, Any]
COSTS = "costs"


class Entry(NamedTuple):
    """form: the SPEC. line: what it does. build: from the SPEC's argument. policy: the class, whose keyword-only
    parameters are the options that the SPEC may name."""

    form: str
    line: str
    build: Callable[[str, DraftShape, Options], DraftPolicy]
    policy: type[Any]


class DraftShape(NamedTuple):
    """What a policy has to know of a draft: channels of its last hidden state, where it runs, and its input embedding
    matrix, (vocab, hidden_size), for heads that read it. For hosts whose model is none of transformers'. checkpoint and
    dtype, where they are known: to say so when a head was trained on others."""

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
        return cls(hidden_size(model), model.device, input_embeddings(model), Checkpoint.of(model), dtype)


def make_policy(spec: str, draft: Pair | PreTrainedModel | DraftShape, *, host: Host = OURS) -> DraftPolicy:
    """Build a policy for a draft (or its pair) from its SPEC. host: who will ask it, for the option `costs`. Raises
    InputError naming the part that is wrong."""
    text, *pairs = spec.split(",")
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy {spec!r}: unknown, expected one of {', '.join(e.form for e in POLICIES.values())}")
    entry = POLICIES[name]
    options = _parse_options(spec, pairs, entry)
    costs, shape = options.pop(COSTS, None), DraftShape.of(draft)
    try:
        policy = entry.build(argument, shape, options)
    except _Malformed:
        raise InputError(f"policy {spec!r}: expected {entry.form}") from None
    return policy if costs is None else batch_stop(policy, costs, host=host, device=shape.device)


def option_types(entry: Entry) -> dict[str, type]:
    """The options that an entry's SPEC may name, each with what it is: int, float, bool, or str for one of some words,
    which the policy checks."""
    signature = inspect.signature(entry.policy).parameters.values()
    hints = get_type_hints(entry.policy.__init__)
    named = [parameter.name for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY]
    # `int | None` is an int that may be left out.
    return {name: next((kind for kind in (bool, int, float) if _allows(hints[name], kind)), str) for name in named}


def _allows(hint: Any, kind: type) -> bool:
    return hint is kind or kind in getattr(hint, "__args__", ())


def _parse_options(spec: str, pairs: list[str], entry: Entry) -> Options:
    known = option_types(entry)
    options: Options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == COSTS:
            options[key] = _costs_option(spec, value, entry)
            continue
        if key not in known:
            expected = sorted([*known, COSTS] if takes_costs(entry) else known)
            raise InputError(f"policy {spec!r}: unknown option {key!r}, expected one of {expected or 'none'}")
        options[key] = _parse_option(spec, key, value, known[key])
    return options


def takes_costs(entry: Entry) -> bool:
    """Whether the option `costs` can be given: not where the argument says them, nor where nothing is drafted."""
    return entry.form != "none" and not entry.form.endswith(COSTS.upper())


def _costs_option(spec: str, value: str, entry: Entry) -> PairCosts:
    """Of a file, or c = t_draft / t_target for any batch."""
    if not takes_costs(entry):
        why = "which drafts nothing" if entry.form == "none" else f"whose argument they are: {entry.form}"
        raise InputError(f"policy {spec!r}: option costs is not for a policy {why}")
    if not _is_number(value):
        if not value:
            raise InputError(f"policy {spec!r}: option costs is empty, expected a file or a number t_draft / t_target")
        return pair_costs(Path(value))
    if not 0 < float(value) < float("inf"):
        raise InputError(f"policy {spec!r}: option costs is {value}, expected a file or t_draft / t_target above 0")
    return PairCosts.constant(ForwardCosts(t_draft=float(value), t_target=1.0))


def _parse_option(spec: str, key: str, value: str, kind: type) -> Any:
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is int and _is_integer(value):
        return int(value)
    if kind is float and _is_number(value):
        return float(value)
    if kind is str:
        return value
    expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    raise InputError(f"policy {spec!r}: option {key} is {value!r}, expected {expected}")


class _Malformed(Exception):
    """The argument is not of the entry's form."""


def _none(argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
    if argument:
        raise _Malformed
    return FixedPolicy(0)


def _rule(
    policy: Callable[..., DraftPolicy], read: Callable[[str], Any], *, needed: bool = False
) -> Callable[[str, DraftShape, Options], DraftPolicy]:
    """A rule with one argument, which has a default unless it is `needed`. read: what the argument says."""

    def build(argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
        if not argument and needed:
            raise _Malformed
        return policy(read(argument), **options) if argument else policy(**options)

    return build


def _online_signals(argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
    return OnlineSignalsPolicy(_number(argument) if argument else 0.5, draft.device, **options)


def _head(argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
    """PATH:THRESHOLD, or PATH alone: threshold, bounds and lag are then those of its decoding.json. A PATH may be a
    name on the Hub, user/name or user/name@revision."""
    path, _, last = argument.rpartition(":")
    if path and _is_number(last):
        return head_policy(path, draft, _number(last), options)
    if not argument:
        raise _Malformed
    return head_policy(argument, draft, None, options)


def head_policy(
    name: str, draft: DraftShape, threshold: float | None, options: Options, folder: Path | None = None
) -> HeadPolicy:
    """The policy of a head. threshold: None = that of its decoding.json, with the bounds and the lag there, where the
    options do not say otherwise. folder: of a head that is here already, whatever its name. Raises InputError."""
    folder = folder or head_folder(name)
    tuned = None
    if threshold is None:
        chosen, tuned = _decoding(name, folder)
        threshold = chosen.pop("threshold")
        options = chosen | options
    head = load_head(folder, hidden_size=draft.hidden_size, device=draft.device, embeddings=draft.embeddings)
    origin = HeadOrigin.read(name, folder, tuned)
    ids = len(draft.embeddings) if draft.embeddings is not None else None
    origin.check_draft(draft.checkpoint, ids, draft.dtype)
    policy = _head_policy(head, threshold, options, folder)
    policy.origin = origin
    return policy


def _head_policy(head: AcceptanceHead, threshold: float, options: Options, folder: Path) -> HeadPolicy:
    if not options.get("online"):
        of_both = {"online", "calibration", *inspect.signature(HeadPolicy).parameters}
        if of_online := [name for name in options if name not in of_both]:
            raise InputError(f"policy head: option {of_online[0]} is of online=true")
    if options.get("calibration"):
        options["calibration"] = DepthCalibration.load(folder)
    if not (options.get("online") or options.get("calibration")):
        plain = {key: value for key, value in options.items() if key not in ("online", "calibration")}
        return HeadPolicy(head, threshold, **plain)
    return RecalibratedHeadPolicy(head, threshold, **options)


def _decoding(name: str, folder: Path) -> tuple[Options, dict[str, Any]]:
    """What `accept-head tune` chose for this head, as options, and all that it wrote."""
    path = folder / "decoding.json"
    if not path.is_file():
        raise InputError(f"{name} has no decoding.json (accept-head tune writes it): give a threshold, head:PATH:0.5")
    values = read_json(path)
    if type(values.get("threshold")) not in (float, int):
        raise InputError(f"{path}: field 'threshold' is {values.get('threshold')!r}, expected a number")
    chosen = {key: values[key] for key in ("threshold", "k_min", "k_max", "lag") if values.get(key) is not None}
    for key, value in chosen.items():
        if key != "threshold" and type(value) is not int:
            raise InputError(f"{path}: field {key!r} is {value!r}, expected an integer")
    return chosen, values


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


def _integer(text: str) -> int:
    if not _is_integer(text):
        raise _Malformed
    return int(text)


def _is_integer(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


def _pair_costs(text: str) -> Any:
    return pair_costs(Path(text))


def _ratio(text: str) -> float:
    """c = t_draft / t_target, given or of a file."""
    return float(text) if _is_number(text) else forward_costs(Path(text)).ratio


def _table(text: str) -> Any:
    return read_batch_table(Path(text))


def _entries(*rows: tuple[str, str, Callable[[str], Any], str, type[Any]]) -> dict[str, Entry]:
    """Rules with one argument; one in brackets can be left out."""
    entries = {}
    for name, argument, read, line, policy in rows:
        form = f"{name}[:{argument[1:-1]}]" if argument.startswith("[") else f"{name}:{argument}"
        entries[name] = Entry(form, line, _rule(policy, read, needed=not argument.startswith("[")), policy)
    return entries


POLICIES = {
    "none": Entry("none", "no drafting: the target alone", _none, FixedPolicy),
    **_entries(
        ("fixed", "K", _integer, "K draft tokens every round", FixedPolicy),
        (
            "leviathan",
            "C|COSTS",
            _ratio,
            "the best K for independent tokens, acceptance measured online",
            LeviathanPolicy,
        ),
        ("hf-heuristic", "[K]", _integer, "transformers: 2 more after full acceptance, else 1 less", HfHeuristicPolicy),
        (
            "hf-confidence",
            "[THRESHOLD]",
            _number,
            "transformers: confidence, its threshold tuned by ROC",
            HfConfidencePolicy,
        ),
        (
            "confidence",
            "[THRESHOLD]",
            _number,
            "stop after a token that the draft gave less than this",
            ConfidencePolicy,
        ),
        (
            "cumulative-confidence",
            "[THRESHOLD]",
            _number,
            "LLMCad: stop when all drawn tokens together had less than this",
            CumulativeConfidencePolicy,
        ),
        ("max-prob", "[THRESHOLD]", _number, "Kangaroo, p-min: stop after a token where max q was less", MaxProbPolicy),
        (
            "max-prob-mean",
            "[THRESHOLD]",
            _number,
            "vLLM's RFC: stop all rows when their mean max q is less",
            MeanMaxProbPolicy,
        ),
        (
            "entropy",
            "[NATS]",
            _number,
            "stop after a token whose distribution had more entropy than this",
            EntropyPolicy,
        ),
        ("svip", "[THRESHOLD]", _number, "SVIP: the same on the scale of its authors", SvipPolicy),
        (
            "adaedl",
            "[LAMBDA]",
            _number,
            "AdaEDL: do not draw where a bound by entropy is below a moving level",
            AdaEdlPolicy,
        ),
        (
            "online-logistic",
            "[THRESHOLD]",
            _number,
            "vLLM's online estimator of acceptance, stop as a head does",
            OnlineLogisticPolicy,
        ),
        (
            "dsde",
            "[K]",
            _integer,
            "DSDE: length by the KL divergence of the verified tokens, and its variance",
            DsdePolicy,
        ),
        (
            "bandit",
            "[ARMS]",
            _integer,
            "BanditSpec: upper confidence bounds over K = 1 to ARMS on tokens/s",
            BanditPolicy,
        ),
        ("batch-map", "FILE", _table, "vLLM's dynamic K: a table from the number of rows to K", BatchMapPolicy),
        (
            "goodput",
            "COSTS",
            _pair_costs,
            "SmartSpec: the K with the best expected tokens/s for the batch",
            GoodputPolicy,
        ),
        (
            "adaspec",
            "COSTS",
            _pair_costs,
            "AdaSpec: draft, verify and drop by expected tokens/s, within an SLO",
            AdaSpecPolicy,
        ),
        ("budget", "COSTS", _pair_costs, "DSpark, vLLM: verify the batch's most likely candidates only", BudgetPolicy),
    ),
    "online-signals": Entry(
        "online-signals[:THRESHOLD]",
        "a head's base, learnt while serving with no traces, stop as a head does",
        _online_signals,
        OnlineSignalsPolicy,
    ),
    "head": Entry(
        "head:PATH[:THRESHOLD]",
        "SpecDec++: stop when the predicted chance of a rejection so far passes it; PATH or user/name[@revision]",
        _head,
        RecalibratedHeadPolicy,
    ),
}
