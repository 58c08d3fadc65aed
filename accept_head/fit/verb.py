"""`accept-head fit`: a pair and prompts → a head, its threshold, a report, and what to use on this machine.

collect → train → measure forward costs → tune by replay → decode what the verdict needs → report. Settings are chosen
on the dev prompts, and judged on the test prompts. Each step is the library function of its own verb.
"""

from __future__ import annotations

import gc
import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from accept_head.checkpoint import checkpoint_fingerprint, reads_target
from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import locked, read_json, writable_folder, write_json
from accept_head.fit.decoding import (
    chosen_specs,
    counts_by_kind,
    decoded,
    forward_costs,
    replayed_rows,
    shown_name,
)
from accept_head.fit.plan import BATCH, Plan, check_disk, measured_speed, planned, position_bytes, seconds_of, shown
from accept_head.fit.prompts import SPLITS, read_all, write_splits
from accept_head.fit.verdict import Verdict, costs_of_runs, judge
from accept_head.inference.policies.registry import for_any_load
from accept_head.inference.profile.device import device_name
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.tune.rules import RULES
from accept_head.inference.verbs.report import report
from accept_head.inference.verbs.tune import tune
from accept_head.pair import Pair, load_pair, load_tokenizer
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling
from accept_head.training.collect.settings import check_positive, room_for_prompts
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

RECORD = "fit.json"
TUNED_RULES = [*RULES, "adaedl", "leviathan", "hf-heuristic", "goodput", "online-logistic", "online-signals"]
WAIT = 0.5  # seconds between two looks for the plan of rank 0


def fit(
    target: str,
    draft: str,
    out: str,
    prompts: str | None = None,
    field: str = "prompt",
    max_prompts: int | None = None,
    budget: str | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 96,
    dtype: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> None:
    """Make a head for a pair of models, compare it with everything that needs no training, and say what to use.

    Run it again with the same options to continue an interrupted run. Under `accelerate launch`, traces and head are
    made by all processes.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's tokenizer; or an EAGLE-3 drafter.
        out: Folder for everything that is made.
        prompts: JSONL file or data set, like those that will be served; a shipped mix of five domains when left out.
        field: Field of a prompt record with the text, or with a list of chat messages.
        max_prompts: Use at most so many prompts; 420 when left out.
        budget: Time that it may take, like 20m; it chooses how many prompts are used.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept; 0 keeps all, as vLLM's draft does.
        max_new_tokens: Longest response, in tokens.
        dtype: auto, float32, bfloat16 or float16.
        seed: Seed of everything.
        trust_remote_code: Run model code that comes with the checkpoints.
    """
    start, folder, sampling = time.monotonic(), Path(out), Sampling(temperature=temperature, top_k=top_k)
    seconds = seconds_of(budget) if budget is not None else None
    check_positive(max_new_tokens=max_new_tokens, max_prompts=max_prompts)
    console = make_console(unseen_width=118)
    models: dict[str, Any] = {"target": target, "draft": draft, "trust_remote_code": trust_remote_code, "dtype": dtype}
    asked = {
        "target": checkpoint_fingerprint(target), "draft": checkpoint_fingerprint(draft), "prompts": prompts,
        "field": field, "sampling": sampling.to_dict(), "max_new_tokens": max_new_tokens, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    if rank:
        while not (folder / RECORD).is_file():  # when rank 0 refuses its input, the launcher ends this process
            time.sleep(WAIT)
        made(folder, models, sampling, max_new_tokens, seed)
        return
    with locked(writable_folder(folder)):
        if (folder / RECORD).is_file():
            check_same(folder / RECORD, asked)
        else:
            prepare(console, folder, models, asked, max_prompts, seconds)
        made(folder, models, sampling, max_new_tokens, seed)
        verdict = compared(folder, models, sampling, max_new_tokens)
    console.rule("verdict")
    for line in verdict.lines():
        console.print(line, highlight=False)
    commands = next_commands(verdict, folder, models, sampling)
    console.print("\nNext:", *commands, sep="\n", highlight=False, soft_wrap=True)  # whole lines, to be pasted
    console.print(
        f"\n{folder / 'summary.json'} and {folder / 'report.html'} hold the figures.",
        f"Took {shown(time.monotonic() - start)}.",
        highlight=False,
    )


# --- before anything is made -----------------------------------------------------------------------------------------


def check_same(record: Path, asked: dict[str, Any]) -> None:
    """Raises InputError when the folder was begun with other options."""
    before = read_json(record)["asked"]
    for name, value in asked.items():
        if before.get(name) != value:
            raise InputError(f"{record}: begun with {name} {before.get(name)!r}, not {value!r}; give another --out")


def prepare(
    console: Console,
    folder: Path,
    models: dict[str, Any],
    asked: dict[str, Any],
    max_prompts: int | None,
    budget: float | None,
) -> None:
    """Check the pair, measure its speed, say what will be done, and write the prompts and the plan."""
    pair = load_pair(**models)
    warn_of_templates(console, models, pair)
    new_tokens = asked["max_new_tokens"]
    found, left_out = read_all(
        asked["prompts"],
        pair.tokenizer,
        field=asked["field"],
        room=room_for_prompts(pair, new_tokens),
        folder=folder / "prompts",
    )
    average = sum(len(prompt.ids) for prompt in found) / len(found)
    speed = measured_speed(pair, round(average) + new_tokens)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    plan = planned(
        speed,
        prompts=min(len(found), max_prompts or len(found)),
        prompt_tokens=average,
        new_tokens=new_tokens,
        budget=budget,
        processes=processes,
    )
    check_disk(folder, plan, average, new_tokens, position_bytes(pair, Sampling(**asked["sampling"])))
    if left_out:
        console.print(f"{left_out} prompts are longer than the models' context leaves room for, and left out.")
    describe(console, pair, speed.draft / speed.alone, plan, new_tokens)
    write_splits(found, plan.sizes, folder / "prompts", asked["seed"])
    write_json(folder / RECORD, {"asked": asked, "plan": asdict(plan)})


def warn_of_templates(console: Console, models: dict[str, Any], pair: Pair) -> None:
    if reads_target(models["draft"]):  # it has no tokenizer of its own
        return
    theirs = load_tokenizer(models["draft"], "--draft", models["trust_remote_code"]).chat_template
    if theirs is not None and theirs != pair.tokenizer.chat_template:
        console.print("The two models have different chat templates: the target's is used for both.", style="yellow")


def describe(console: Console, pair: Pair, ratio: float, plan: Plan, new_tokens: int) -> None:
    where = f"{device_name(pair.target.device)}, {str(pair.target.dtype).removeprefix('torch.')}"
    console.print(f"{where}: a draft forward takes {ratio:.2f} of a target forward.", highlight=False)
    what = {
        "collect": f"{sum(plan.sizes.values())} answers of at most {new_tokens} tokens, {BATCH} at a time",
        "train": f"a head on {plan.train} of them",
        "profile and tune": f"thresholds on {plan.dev} others",
        "decode": f"{plan.test} further prompts with four policies, one at a time",
        "report": "every policy replayed on these",
    }
    for step, seconds in plan.seconds.items():
        console.print(f"  {step:17} {what[step]:60} about {shown(seconds)}", highlight=False)
    console.print(f"  {'':17} {'all':60} about {shown(plan.total)}", highlight=False)


# --- the steps -------------------------------------------------------------------------------------------------------


def made(folder: Path, models: dict[str, Any], sampling: Sampling, max_new_tokens: int, seed: int) -> None:
    """Traces and the head, by all processes."""
    gc.collect()  # what was measured before has left its models in cycles
    for split in SPLITS:
        collect(
            prompts=str(folder / "prompts" / f"{split}.jsonl"),
            out=str(folder / "traces" / split),
            max_new_tokens=max_new_tokens,
            batch_size=BATCH,
            shard_size=BATCH,
            seed=SPLITS.index(split) + seed * len(SPLITS),
            **models,
            **sampling.to_dict(),
        )
    if not (folder / "head" / "model.safetensors").is_file():
        train(
            traces=str(folder / "traces" / "train"),
            dev_traces=str(folder / "traces" / "dev"),
            draft=models["draft"],
            out=str(folder / "head"),
            cache=not reads_target(models["draft"]),  # the states of an EAGLE-3 drafter are collected
            seed=seed,
            trust_remote_code=models["trust_remote_code"],
        )
    gc.collect()  # a run leaves its models in cycles


def compared(folder: Path, models: dict[str, Any], sampling: Sampling, max_new_tokens: int) -> Verdict:
    """Costs, thresholds, decoding, the report, and summary.json → the verdict."""
    head, tuned, test = folder / "head", folder / "tuned.json", folder / "traces" / "test"
    draft_options = {name: models[name] for name in ("dtype", "trust_remote_code")}
    pair = load_pair(**models)
    costs = forward_costs(folder / "costs.json", pair, models, folder / "prompts" / "dev.jsonl", sampling)
    if not tuned.is_file():
        tune(
            traces=str(folder / "traces" / "dev"), draft=models["draft"], head=[str(head)], rules=TUNED_RULES,
            costs=str(folder / "costs.json"), out=str(tuned), **draft_options,
        )  # fmt: skip
    specs = chosen_specs(tuned)
    prompts = load_prompts(str(folder / "prompts" / "test.jsonl"), pair.tokenizer)
    runs = decoded(pair, specs, prompts, sampling, max_new_tokens, folder / "decoded.jsonl")
    names = {kind: shown_name(spec, head) for kind, spec in specs.items()}
    costs = costs_of_runs(runs) or costs
    verdict = judge(counts_by_kind(runs), runs, names, costs)
    traces = load_coupled(test, pair.draft, checkpoint_fingerprint(models["draft"]), k_max=20)
    summary = {
        "costs": asdict(costs),
        "sampling": sampling.to_dict(),
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "chosen_on_dev": [names["head"], names["rule"]],
        "policies": replayed_rows(traces, pair.draft, specs, head, costs),
        "verdict": verdict.to_dict(),
    }
    write_json(folder / "summary.json", summary)
    del pair
    report(
        traces=str(test),
        draft=models["draft"],
        head=[str(head)],
        tuned=str(tuned),
        out=str(folder / "report.html"),
        costs=str(folder / "summary.json"),
        verdict=str(folder / "summary.json"),
        **draft_options,
    )
    return verdict


# --- what next -------------------------------------------------------------------------------------------------------


def next_commands(verdict: Verdict, folder: Path, models: dict[str, Any], sampling: Sampling) -> list[str]:
    """Commands to paste for what was recommended."""
    if verdict.use == "none":
        return ["  decode with the target alone; another draft, or a quicker one, may pay"]
    head = folder / "head"
    policy = f"head:{head}" if verdict.use == "head" else verdict.names[verdict.use]
    pair = ("--target", models["target"], "--draft", models["draft"])
    temperature = ("--temperature", f"{sampling.temperature:g}")
    prompts = ("--prompts", folder / "prompts" / "test.jsonl", "--out", folder / "out.jsonl")
    as_asked = (*temperature, "--top_k", sampling.top_k, "--dtype", models["dtype"])
    chosen = ("--head", head) if verdict.use == "head" else ("--policy", for_any_load(policy))
    commands = [
        ("generate", *pair, *prompts, "--policy", policy, *as_asked),
        ("vllm-config", *pair, *chosen, *temperature, "--out", folder / "serve.yaml"),
    ]
    commands += [("publish", head, "USER/NAME")] if verdict.use == "head" else []
    return [
        *(f"  {shlex.join(map(str, ('accept-head', *words)))}" for words in commands),
        "  from accept_head import load_pair",
        "  from accept_head.inference.adapters.transformers import generate as speculative",
        f"  pair = load_pair({models['target']!r}, {models['draft']!r}, dtype={models['dtype']!r})",
        '  inputs = pair.tokenizer("Once upon a time", return_tensors="pt").to(pair.target.device)',
        f"  pair.target.generate(**inputs, custom_generate=speculative, draft=pair.draft, policy={policy!r})",
    ]
