"""The options to start vLLM with, for a pair, a policy and a table by batch size.

vLLM has a fixed draft length and a table of its own: these need neither the plugin nor synchronous scheduling.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, writable_file
from accept_head.hub.folder import head_folder
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.models import Models, place_of
from accept_head.inference.adapters.vllm.settings import KEY
from accept_head.inference.costs.batch_table import FIELD, Range, read_batch_table
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policies.spec import head_parts
from accept_head.inference.policy import DraftPolicy
from accept_head.sampling import Sampling
from accept_head.trace.config import CONFIG_NAME

Options = dict[str, Any]  # of vLLM's command line, without the two dashes


class Serving(NamedTuple):
    """vLLM's options. notes: what the user should know about them."""

    options: Options
    notes: list[str]


def serving(
    target: str,
    draft: str,
    models: Models,
    spec: str | None,
    *,
    batch_map: str | None,
    temperature: float | None,
    num_speculative_tokens: int | None,
    tensor_parallel_size: int | None,
    trust_remote_code: bool,
) -> Serving:
    """The options and notes for a pair. spec: of the policy; None for vLLM's own rules. temperature: of requests; when
    left out, that of the head's traces, or 1 without a head. Raises InputError for what vLLM or the adapter would
    refuse."""
    policy = make_policy(spec, models.shape) if spec is not None else None
    trained = _trained(spec)
    served = Sampling(temperature=_trained_temperature(trained, 1.0) if temperature is None else temperature)
    table = _table(batch_map, policy)
    most = most_tokens(policy, table, num_speculative_tokens, models.context)
    options = _vllm_options(target, draft, models.method, most, served, table, tensor_parallel_size)
    notes: list[str] = []
    if policy is not None and not isinstance(policy, FixedPolicy | BatchMapPolicy):
        # Run the adapter's own checks before anything is started.
        PolicyHost(policy, rows=1, limit=most, device=models.shape.device, greedy=served.greedy)
        # Not `async-scheduling: false`, which `vllm serve --config` silently drops.
        options["no-async-scheduling"] = True
        options["additional-config"] = {KEY: {"policy": spec}}
        notes = ["Where vLLM runs, accept-head must be installed too.", *_notes(trained, draft, served)]
    if trust_remote_code:
        options["trust-remote-code"] = True
    return Serving(options, notes)


def _vllm_options(
    target: str,
    draft: str,
    method: str,
    most: int,
    served: Sampling,
    table: list[Range] | None,
    tensor_parallel_size: int | None,
) -> Options:
    """The options that are the same with and without the plugin."""
    speculation: Options = {
        "method": method,
        "model": place_of(draft),
        "num_speculative_tokens": most,
        "draft_sample_method": "greedy" if served.greedy else "probabilistic",
    }
    options: Options = {"model": place_of(target), "speculative-config": speculation}
    if tensor_parallel_size is not None:
        if tensor_parallel_size < 1:
            raise InputError(f"tensor_parallel_size is {tensor_parallel_size}, expected a positive integer")
        options["tensor-parallel-size"] = tensor_parallel_size
        speculation["draft_tensor_parallel_size"] = tensor_parallel_size  # vLLM requires the same for the draft
    if table is not None:
        speculation[FIELD] = [list(row) for row in table]
    return options


# --- lengths ---------------------------------------------------------------------------------------------------------


def _table(batch_map: str | None, policy: DraftPolicy | None) -> list[Range] | None:
    """The table for vLLM's own rule, from the file or from a `batch-map` policy."""
    if isinstance(policy, BatchMapPolicy):
        if batch_map is not None:
            raise InputError("--batch_map and --policy batch-map say the same thing: expected one of them")
        return policy.table
    return read_batch_table(Path(batch_map)) if batch_map is not None else None


def most_tokens(policy: DraftPolicy | None, table: list[Range] | None, wanted: int | None, context: int) -> int:
    """vLLM's num_speculative_tokens: the smaller limit of policy and table, or `wanted` if it is within that limit.

    A table was measured with drafts of full length. Under a policy that stops early its limit is rather too low: a
    depth that is not worth drafting for all rows can be worth it for the few rows that go on.
    """
    if policy is None and table is None:
        raise InputError("no policy is named: expected --head, --policy, --tuned or --batch_map")
    limits = [policy.max_draft_tokens] if policy is not None else []
    limits += [max(k for _, _, k in table)] if table is not None else []
    most, fewest = min(limits), getattr(policy, "k_min", 1)
    if most == 0:
        raise InputError("no tokens are ever drafted: start vLLM with the target alone")
    if wanted is not None:
        if not fewest <= wanted <= most:
            raise InputError(f"num_speculative_tokens is {wanted}, expected {fewest} to {most}, as the policy drafts")
        most = wanted
    if most + 2 > context:
        raise InputError(
            f"num_speculative_tokens would be {most}, but the models have positions for {context} tokens only"
        )
    return most


# --- what the head was trained for -----------------------------------------------------------------------------------


def _trained(spec: str | None) -> dict[str, Any]:
    """The trace config of the SPEC's head; empty without a head or a config."""
    name, _, argument = (spec or "").partition(",")[0].partition(":")
    if name != "head":
        return {}
    path = head_folder(head_parts(argument)[0]) / CONFIG_NAME
    return read_json(path) if path.is_file() else {}


def _trained_temperature(trained: dict[str, Any], otherwise: float) -> float:
    sampling = trained.get("sampling")
    value = sampling.get("temperature") if isinstance(sampling, dict) else None
    return float(value) if isinstance(value, int | float) else otherwise


def _notes(trained: dict[str, Any], draft: str, served: Sampling) -> Iterator[str]:
    """Warnings about settings that work, but not as well as possible."""
    here = any(Path(draft).glob("*.safetensors"))
    if trained and here and trained.get("draft_fingerprint") != checkpoint_fingerprint(draft):
        yield f"The head was trained on another draft ({trained.get('draft')})."
    temperature = _trained_temperature(trained, served.temperature)
    if temperature != served.temperature:
        yield f"The head was trained at temperature {temperature:g}, not {served.temperature:g}."
    sampling = trained.get("sampling")
    if temperature and isinstance(sampling, dict) and (sampling.get("top_k") or sampling.get("top_p", 1) < 1):
        yield "The head was trained with top-k or top-p; vLLM's draft samples by temperature alone."


# --- writing ---------------------------------------------------------------------------------------------------------


def command_line(options: Options) -> str:
    """The command `vllm serve …`, quoted for a shell."""
    words = ["vllm", "serve", options["model"]]
    for name, value in options.items():
        if name != "model":
            words += [f"--{name}"] if value is True else [f"--{name}", _word(value)]
    return shlex.join(words)


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def yaml_path(out: str) -> Path:
    if not out.endswith((".yaml", ".yml")):
        raise InputError(f"--out {out}: expected a name that ends in .yaml, vLLM reads no other")
    return writable_file(Path(out))


def write_yaml(path: Path, options: Options, notes: list[str]) -> None:
    values = yaml.safe_dump(options, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1 << 20)
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join([*(f"# {note}" for note in notes), values]), encoding="utf-8")
