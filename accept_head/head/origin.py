"""What a head was trained for, against what it is used for.

Decoded text stays exact with any head: a wrong one only stops drafting at the wrong moments. So another draft of the
same shape, another target, dtype or sampling is a warning, one line, once. A draft with another hidden size, or without
some of the recorded ids, cannot be used at all, and is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import try_to_load_from_cache

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.hub.folder import TRAINING_NAME
from accept_head.pair import checkpoint_fingerprint
from accept_head.sampling import Sampling
from accept_head.trace.config import CONFIG_NAME, TraceConfig, fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Checkpoint(NamedTuple):
    """Where a model's weights came from: a folder, or a name on the Hub at some revision.

    revision: None = main, as cached. A loaded model does not know any other.
    """

    name: str
    revision: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Checkpoint:
        return cls(model.name_or_path or "")


class HeadOrigin:
    """What a head's folder records of its training, in trace_config.json. What is not recorded is not checked.

    head: as the user names it. sampling: the settings it was trained for, or those of the traces that its threshold was
    tuned on.
    """

    def __init__(self, head: str, recorded: Mapping[str, Any], sampling: Mapping[str, Any]):
        self.head, self.recorded, self.sampling = head, recorded, sampling

    @classmethod
    def read(cls, head: str, folder: Path, tuned: Mapping[str, Any] | None = None) -> HeadOrigin:
        """Of any version of the file. tuned: decoding.json, when the threshold is its. Raises InputError when a file is
        not a JSON object."""
        path = folder / CONFIG_NAME
        recorded = read_json(path) if path.is_file() else {}
        traces = (tuned or {}).get("traces")
        sampling = (traces if isinstance(traces, dict) else {}).get("sampling", recorded.get("sampling"))
        return cls(head, recorded, sampling if isinstance(sampling, dict) else {})

    def check_draft(self, checkpoint: Checkpoint | None, vocab_size: int | None, dtype: str | None) -> None:
        """vocab_size: ids that the draft has embeddings for. None = not known. Raises InputError when a head cannot
        work with such a draft."""
        ids = self.recorded.get("vocab_size")
        if isinstance(ids, int) and vocab_size is not None and vocab_size < ids:
            raise InputError(
                f"{self.head}: the head was trained on a draft with {ids} token ids, but this one has {vocab_size}; a "
                "head belongs to the draft it was trained on"
            )
        self._check_model("draft", checkpoint)
        trained = self.recorded.get("dtype")
        if dtype is not None and isinstance(trained, str) and trained != dtype:
            self._warn(
                f"was trained on the draft in {trained}, but the draft runs in {dtype}", "it predicts about as well"
            )

    def check_target(self, checkpoint: Checkpoint) -> None:
        self._check_model("target", checkpoint)

    def _check_model(self, role: str, checkpoint: Checkpoint | None) -> None:
        trained = self.recorded.get(f"{role}_fingerprint")
        if checkpoint is None or not isinstance(trained, str):
            return
        found = _fingerprint(checkpoint)
        if found not in (None, trained):
            recorded = f"{self.recorded.get(role)} ({trained[:8]})"
            self._warn(f"was trained with the {role} {recorded}, but is used with {checkpoint.name} ({found:.8})")

    def check_sampling(self, sampling: Sampling) -> None:
        """Against the settings that text is decoded with."""
        trained, now = _shown(self.sampling), _shown(sampling.to_dict())
        if self.sampling and trained != now:
            self._warn(f"was trained or tuned for {trained}, but decodes with {now}")

    def check_mode(self, *, greedy: bool) -> None:
        """Where requests bring settings of their own, and only this is known beforehand."""
        temperature = self.sampling.get("temperature")
        if isinstance(temperature, int | float) and (temperature == 0) != greedy:
            drafts = "takes the draft's likeliest tokens" if greedy else "samples drafts"
            self._warn(f"was trained or tuned for {_shown(self.sampling)}, but {drafts}")

    def _warn(self, what: str, effect: str = "drafts may end at wrong moments") -> None:
        _say_once(f"accept-head: head {self.head} {what}; text stays exact, {effect}")


def check_use(policy: object, target: Checkpoint, sampling: Sampling) -> None:
    """Target and sampling that a policy is about to meet, against what its head, if it has one, was trained for."""
    if (origin := origin_of(policy)) is not None:
        origin.check_target(target)
        origin.check_sampling(sampling)


def check_unseen(head: str, folder: Path, traces: Path, config: TraceConfig) -> None:
    """Traces that a head in `folder` is tuned or calibrated on: its word on what it learnt from is too sure. Of other
    sampling than it was trained for, or of its prompts drawn anew, is a warning. Raises InputError for the very traces.
    """
    path, origin = folder / TRAINING_NAME, HeadOrigin.read(head, folder)
    several = read_json(path).get("traces") if path.is_file() else None  # one is recorded as the head's origin
    learnt_from = {each.get("fingerprint") for each in several or [] if isinstance(each, dict)}
    if config.fingerprint() in {*learnt_from, fingerprint_of(origin.recorded)}:
        raise InputError(f"{traces}: the head {head} was trained on these traces, expected some of other prompts")
    if origin.recorded.get("prompts_fingerprint") == config.prompts_fingerprint:
        _say_once(f"accept-head: head {head} was trained on the prompts of {traces}, whatever was answered; use others")
    if origin.sampling and _shown(origin.sampling) != _shown(config.sampling.to_dict()):
        of = _shown(config.sampling.to_dict())
        _say_once(f"accept-head: head {head} was trained for {_shown(origin.sampling)}, but the traces are of {of}")


def origin_of(policy: object) -> HeadOrigin | None:
    """Of a policy with a head, or around one; None of any other."""
    while (inner := getattr(policy, "policy", None)) is not None:
        policy = inner
    origin = getattr(policy, "origin", None)
    return origin if isinstance(origin, HeadOrigin) else None


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("accept_head").warning(message)


@functools.lru_cache(maxsize=16)
def _fingerprint(checkpoint: Checkpoint) -> str | None:
    """None where the weights are not at hand: then nothing is known, and nothing is said. Never from the network."""
    if not checkpoint.name:
        return None
    try:
        folder: str | None = checkpoint.name
        if not Path(checkpoint.name).is_dir():
            cached = try_to_load_from_cache(checkpoint.name, "config.json", revision=checkpoint.revision)
            folder = str(Path(cached).parent) if isinstance(cached, str) else None
        return checkpoint_fingerprint(folder) if folder else None
    except (OSError, ValueError):
        return None


def _shown(settings: Mapping[str, Any]) -> str:
    """Settings that mean the same read the same: when greedy, only the temperature means anything."""
    values = {name: settings.get(name, default) for name, default in SETTINGS.items()}
    if values["temperature"] == 0:
        return "greedy decoding"
    return ", ".join(f"{name} {v:g}" if isinstance(v, int | float) else f"{name} {v}" for name, v in values.items())
