"""`accept-head collect`: prompts → the target's responses → scored, coupled traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.pair import load_pair
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling
from accept_head.training.collect.collector import write_shards
from accept_head.training.collect.decoding import Decoding
from accept_head.training.collect.dry_run import collect_plan
from accept_head.training.collect.settings import (
    check_positive,
    check_source,
    checked_alternatives,
    checked_depths,
    room_for_prompts,
    trace_config,
)
from accept_head.training.collect.source import ScoredResponses, Source
from accept_head.training.launch import local_device, set_cpu_threads, trainer_options
from accept_head.training.respond.backends import Backend, check_backend, make_responder
from accept_head.training.respond.stored import StoredResponses
from accept_head.training.threads import share_of_cores


def collect(
    target: str,
    draft: str,
    out: str,
    prompts: str | None = None,
    responses: str | None = None,
    field: str = "prompt",
    split: str = "train",
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_new_tokens: int | None = None,
    max_prompts: int | None = None,
    batch_size: int = 32,
    shard_size: int | None = None,
    alternatives: int | None = None,
    depths: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device_map: str | None = None,
    max_memory: dict[str, str] | None = None,
    offload_folder: str | None = None,
    backend: Backend = "loop",
    draft_policy: str | None = None,
    tensor_parallel_size: int | None = None,
    gpu_memory_utilization: float | None = None,
    endpoint: str | None = None,
    served_name: str | None = None,
    concurrency: int | None = None,
    retries: int | None = None,
    dry_run: bool = False,
    model_shapes: str | None = None,
    repair: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Let the target answer prompts and record what the draft would have proposed: a folder of coupled traces.

    Run it again with the same options to continue an interrupted run. Under `accelerate launch` the work is divided
    over the processes.

    Args:
        target: Target model, a folder or Hub name.
        draft: Draft model, or an EAGLE-3 drafter; a folder or Hub name. It must share the target's tokenizer.
        out: Folder for the traces.
        prompts: JSONL file, or a name or folder for `datasets.load_dataset`.
        responses: Instead of `prompts`, a folder of traces of the same pair: its prompts and responses, which may have
            been sampled otherwise, are scored under these settings, and nothing is generated. Such traces can train a
            head (a greedy head learns from sampled text too), but not be replayed.
        field: Field of a prompt record with the text, or with a list of chat messages.
        split: Split to read when `prompts` is a data set.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept; 0 keeps all.
        top_p: Probability mass kept; 1 keeps all.
        min_p: Least probability kept, as a share of the most likely token's; 0 keeps all.
        max_new_tokens: Longest response, in tokens; 128 when left out, or that of `responses`.
        max_prompts: Use the first so many prompts only.
        batch_size: Prompts generated together.
        shard_size: Prompts in one shard, the unit of work that an interruption loses; 64 when left out, or that of
            `responses`.
        alternatives: Further draws of the draft at each position, with the chance that each would be accepted: a head
            learns from them what it would else need more text for. 4 when left out, or as many as the unfinished
            traces in `out` have; none greedily.
        depths: Of an EAGLE-3 drafter, whose distribution depends on where a round began: the longest round that can be
            replayed, in tokens; 8 when left out. The drafter runs so often over each response.
        seed: Seed of responses and coupling.
        dtype: auto, float32, bfloat16 or float16.
        device_map: `auto` spreads the target over all devices of this process.
        max_memory: With device_map: most of the target that each device may hold, like {"0": "60GiB", "cpu": "200GiB"}.
        offload_folder: With device_map: where the part goes that fits on no device.
        backend: What generates the responses. `loop`: our decode loop, which scores each position as it is decoded;
            `vllm`, in this process; or `openai`, a server with an OpenAI-compatible completions endpoint that takes and
            returns token ids. Its key is read from the environment variable OPENAI_API_KEY. Our own copy of the target
            scores the responses of the last two.
        draft_policy: loop: SPEC of a policy to speculate with; `none` when left out. The text is the same but for
            rounding.
        tensor_parallel_size: vllm: GPUs that share its copy of the target; 1 when left out.
        gpu_memory_utilization: vllm: share of each GPU for it; 0.5 when left out, as our copy lives there too.
        endpoint: openai: the server's address, like http://127.0.0.1:8000/v1.
        served_name: openai: what the server calls the target; the value of `target` when left out.
        concurrency: openai: requests in flight; 32 when left out.
        retries: openai: attempts of one request after the first, with growing pauses; 8 when left out.
        dry_run: Load no weights and write nothing: resolve every name and print what the run would cost.
        model_shapes: With dry_run: folder with a `NAME/config.json` for models that cannot be reached from here.
        repair: Read the shards that are there, and collect damaged ones again; the others stay as they are.
        trust_remote_code: Run model code that comes with the checkpoints.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    engine: dict[str, Any] = {
        "draft_policy": draft_policy,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "endpoint": endpoint,
        "served_name": served_name,
        "concurrency": concurrency,
        "retries": retries,
    }
    check_positive(max_new_tokens=max_new_tokens, batch_size=batch_size, shard_size=shard_size)
    depths = checked_depths(depths, draft, backend, responses, dry_run=dry_run)
    alternatives = 0 if depths else checked_alternatives(alternatives, Path(out), sampling)
    check_source(prompts, responses, backend, dry_run=dry_run)
    check_backend(backend, engine, dry_run=dry_run)
    if dry_run:
        plan = collect_plan(
            target, draft, out=Path(out), prompts=str(prompts), field=field, split=split, max_prompts=max_prompts,
            max_new_tokens=max_new_tokens or 128, batch_size=batch_size, alternatives=alternatives,
            concurrency=concurrency, dtype=dtype, backend=backend, model_shapes=model_shapes,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        print(plan)
        return
    if model_shapes is not None:
        raise InputError("--model_shapes is given, but only --dry_run true reads it")
    options = trainer_options()
    set_cpu_threads(share_of_cores(options["devices"]))
    pair = load_pair(
        target,
        draft,
        dtype=dtype,
        device=local_device(),
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        trust_remote_code=trust_remote_code,
    )
    stored = None
    if responses is not None:
        stored = StoredResponses.of(Path(responses), checkpoint_fingerprint(target), checkpoint_fingerprint(draft))
        max_new_tokens = stored.setting("max_new_tokens", max_new_tokens)
        shard_size = stored.setting("shard_size", shard_size)
        loaded = stored.prompts(max_prompts)
    else:
        max_new_tokens, shard_size = max_new_tokens or 128, shard_size or 64
        room = room_for_prompts(pair, max_new_tokens)
        loaded = load_prompts(
            str(prompts), pair.tokenizer, field=field, split=split, max_prompts=max_prompts, max_prompt_tokens=room
        )
    config = trace_config(
        pair,
        (target, draft),
        loaded,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        shard_size=shard_size,
        alternatives=alternatives,
        depths=depths,
        backend=backend,
        source=prompts,
        stored=stored,
    )
    source: Source
    if stored is None and backend == "loop":
        source = Decoding(pair, loaded, config, draft_policy or "none")
    else:
        responder = make_responder(
            backend, pair, loaded, config, engine, stored=stored, trust_remote_code=trust_remote_code
        )
        source = ScoredResponses(pair, config, responder)
    write_shards(options, loaded, config, Path(out), source, repair=repair)
