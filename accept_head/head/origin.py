"""Checks that a head is used with the models and settings it was trained for.

Decoded text stays exact with any head. A wrong head only stops drafting at the wrong moments. So another draft of the
same shape, another target, dtype or sampling gives one line of warning, once. A draft with another hidden size, or one
that lacks some of the recorded token ids, cannot work and is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import try_to_load_from_cache

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.hub.folder import TRAINING_NAME
from accept_head.sampling import Sampling
from accept_head.trace.config import CONFIG_NAME, TraceConfig, fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Checkpoint(NamedTuple):
    """Where a model's weights came from: a folder, or a name on the Hub at some revision.

    revision: None = main, as cached. A loaded model does not know its revision.
    """

    name: str
    revision: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Checkpoint:
        return cls(model.name_or_path or "")


class HeadOrigin:
    """What the trace_config.json in a head's folder records about its training. What is not recorded is not checked.

    head: the name that the user gave. sampling: the settings the head was trained for, or the settings of the traces
    that its threshold was tuned on.
    """

    def __init__(self, head: str, recorded: Mapping[str, Any], sampling: Mapping[str, Any]):
        self.head, self.recorded, self.sampling = head, recorded, sampling

    @classmethod
    def read(cls, head: str, folder: Path, tuned: Mapping[str, Any] | None = None) -> HeadOrigin:
        """Read the folder's trace_config.json, of any version. Raises InputError when a file is not a JSON object.

        tuned: content of decoding.json, when the threshold comes from there.
        """
        path = folder / CONFIG_NAME
        recorded = read_json(path) if path.is_file() else {}
        traces = (tuned or {}).get("traces")
        sampling = (traces if isinstance(traces, dict) else {}).get("sampling", recorded.get("sampling"))
        return cls(head, recorded, sampling if isinstance(sampling, dict) else {})

    def check_draft(self, checkpoint: Checkpoint | None, vocab_size: int | None, dtype: str | None) -> None:
        """Warn when the draft differs. Raises InputError when the head cannot work with it.

        vocab_size: number of ids that the draft has embeddings for. None, for any argument: not known.
        """
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
        """Warn when text is decoded with other sampling settings."""
        trained, now = _shown(self.sampling), _shown(sampling.to_dict())
        if self.sampling and trained != now:
            self._warn(f"was trained or tuned for {trained}, but decodes with {now}")

    def check_mode(self, *, greedy: bool) -> None:
        """Warn when only one of training and decoding is greedy.

        For engines where each request has its own settings and only `greedy` is known beforehand.
        """
        temperature = self.sampling.get("temperature")
        if isinstance(temperature, int | float) and (temperature == 0) != greedy:
            drafts = "takes the draft's likeliest tokens" if greedy else "samples drafts of requests with a temperature"
            self._warn(f"was trained or tuned for {_shown(self.sampling)}, but {drafts}")

    def _warn(self, what: str, effect: str = "drafts may end at wrong moments") -> None:
        _say_once(f"accept-head: head {self.head} {what}; text stays exact, {effect}")


def check_use(policy: object, target: Checkpoint, sampling: Sampling) -> None:
    """Warn when the policy has a head that was trained for another target or other sampling settings."""
    if (origin := origin_of(policy)) is not None:
        origin.check_target(target)
        origin.check_sampling(sampling)


def check_unseen(head: str, folder: Path, traces: Path, config: TraceConfig) -> None:
    """Check the traces that the head in `folder` is tuned or calibrated on: a head is overconfident on training data.

    Raises InputError when the head was trained on these traces. Warns when it was trained on the same prompts with
    other responses, or for other sampling settings.
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
    """The origin of a policy's head, also when the policy is wrapped in others. None when there is no head."""
    origin = getattr(innermost(policy), "origin", None)
    return origin if isinstance(origin, HeadOrigin) else None


def innermost(policy: object) -> object:
    """The policy without those that wrap it."""
    while (inner := getattr(policy, "policy", None)) is not None:
        policy = inner
    return policy


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("accept_head").warning(message)


@functools.lru_cache(maxsize=16)
def _fingerprint(checkpoint: Checkpoint) -> str | None:
    """The checkpoint's fingerprint, or None when its files are not on this machine. Does not use the network."""
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
    """The settings as text. All greedy settings give the same text, because greedy decoding ignores the others."""
    values = {name: settings.get(name, default) for name, default in SETTINGS.items()}
    if values["temperature"] == 0:
        return "greedy decoding"
    return ", ".join(f"{name} {v:g}" if isinstance(v, int | float) else f"{name} {v}" for name, v in values.items())
