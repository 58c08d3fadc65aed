"""The policy `head:PATH`: a head from a folder or from the Hub, with the settings that `tune` chose."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from accept_head.calibration import DepthCalibration
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.head.network import AcceptanceHead
from accept_head.head.origin import HeadOrigin
from accept_head.head.saved import load_head
from accept_head.hub.folder import head_folder
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.spec import DraftShape, Malformed, Options, head_parts, named
from accept_head.inference.policy import DraftPolicy


def _head(argument: str, draft: DraftShape, options: Options) -> DraftPolicy:
    """Reads PATH:THRESHOLD, or PATH alone; threshold, bounds and lag then come from its decoding.json. PATH may be a
    name on the Hub, user/name or user/name@revision."""
    if not argument:
        raise Malformed
    path, threshold = head_parts(argument)
    return head_policy(path, draft, float(threshold) if threshold else None, options)


named(
    "head",
    "PATH[:THRESHOLD]",
    "SpecDec++: stop when the predicted chance of a rejection so far passes it; PATH or user/name[@revision]",
    build=_head,
)(RecalibratedHeadPolicy)


def head_policy(
    name: str, draft: DraftShape, threshold: float | None, options: Options, folder: Path | None = None
) -> HeadPolicy:
    """The policy of a head. threshold: None = take threshold, bounds and lag from its decoding.json; options override
    them. folder: the head's folder, if it is local already; `name` is then only its name. Raises InputError."""
    folder = folder or head_folder(name)
    tuned = None
    if threshold is None:
        chosen, tuned = read_decoding(name, folder)
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


def read_decoding(name: str, folder: Path) -> tuple[Options, dict[str, Any]]:
    """The options that `accept-head tune` chose for this head, and the whole content of decoding.json."""
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
