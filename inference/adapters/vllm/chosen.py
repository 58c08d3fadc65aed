"""The policy that vLLM runs: one SPEC with absolute paths, from the user's options or from the result of `tune`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.policies.registry import COSTS, POLICIES, for_any_load, make_policy
from accept_head.inference.policies.spec import DraftShape, head_parts, is_number
from accept_head.inference.policy import DraftPolicy


def chosen_spec(head: str | None, policy: str | None, tuned: str | None, shape: DraftShape) -> str | None:
    """One SPEC with absolute paths, since vLLM may start in any folder. None: only vLLM's own rules. What `tune`
    chose, with one request at a time, also gets costs=auto: vLLM serves any number."""
    if policy is not None and (head is not None or tuned is not None):
        raise InputError(f"--policy {policy}: expected without --head and --tuned, which say the policy too")
    if tuned is not None:
        return for_any_load(absolute(tuned_spec(Path(tuned), head, shape)))
    if head is not None:
        return for_any_load(f"head:{_held(head)}")
    return absolute(policy) if policy is not None else None


def absolute(spec: str) -> str:
    """The SPEC with absolute paths of its files and folders. Raises InputError for a path that a SPEC cannot hold."""
    text, *options = spec.split(",")
    name, _, argument = text.partition(":")
    if name == "head":
        path, threshold = head_parts(argument)
        argument = ":".join([_held(path), threshold] if threshold else [_held(path)])
    elif name in POLICIES and any(kind in POLICIES[name].form for kind in ("FILE", "COSTS")):
        argument = _held(argument)
    pairs = [option.partition("=") for option in options]
    options = [f"{key}={_held(value) if key == COSTS else value}" if equals else key for key, equals, value in pairs]
    return ",".join([f"{name}:{argument}" if argument else text, *options])


def _held(path: str) -> str:
    """The absolute path if the file or folder exists. A number or a name on the Hub is returned unchanged."""
    if not os.path.exists(path) or is_number(path):
        return path
    if "," in (place := os.path.abspath(path)):
        raise InputError(f"{place}: the path has a comma in it, which begins the options of a policy's SPEC; move it")
    return place


def tuned_spec(path: Path, head: str | None, shape: DraftShape) -> str:
    """The SPEC that `accept-head tune` found for the head; without a head, that of the fastest policy that vLLM can
    run. Raises InputError naming the file."""
    try:
        rows = sorted(read_json(path)["policies"], key=lambda row: -row["throughput"])
        ranked = [row["spec"] for row in rows if isinstance(row.get("spec"), str)]  # the oracle has none
    except (TypeError, KeyError, AttributeError):
        ranked = []
    if not ranked:
        raise InputError(f"{path}: expected a file by accept-head tune, whose policies have a spec and a throughput")
    if head is not None:
        for spec in ranked:
            name, _, argument = spec.partition(",")[0].partition(":")
            if name == "head" and os.path.abspath(head_parts(argument)[0]) == os.path.abspath(head):
                return spec
        raise InputError(f"{path}: --head {head} is not among its policies")
    for spec in ranked:
        if spec == "none":
            raise InputError(f"{path}: nothing that vLLM can run is faster there than the target alone")
        if _servable(make_policy(spec, shape)):
            return spec
    raise InputError(f"{path}: none of its policies can run in vLLM")


def _servable(policy: DraftPolicy) -> bool:
    try:
        PolicyHost(policy, rows=1, limit=1, device=torch.device("cpu"), greedy=False)
    except InputError:
        return False
    return True
