"""`accept-head report`: one HTML page, and PNGs, of what every policy costs on traces, and of single rounds.

Thresholds come from where they were chosen: a head's decoding.json, `--tuned` for the others. What was chosen nowhere
is chosen on these traces, and the page says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.files import read_json, writable_file
from accept_head.inference.costs.files import read_costs
from accept_head.inference.profile.device import command_line
from accept_head.inference.replay.coupled import LONGEST, load_coupled
from accept_head.inference.replay.truth import informed_tables, target_loader
from accept_head.inference.report.build import build_report
from accept_head.inference.report.page import write_report
from accept_head.inference.report.rules import read_choices
from accept_head.inference.tune.heads import load_heads
from accept_head.pair import load_draft, load_tokenizer
from accept_head.trace.shards import finished_config


def report(
    traces: str,
    draft: str,
    out: str = "report.html",
    head: list[str] | None = None,
    tuned: str | None = None,
    costs: str | None = None,
    t_draft: float | None = None,
    t_target: float | None = None,
    target_times: float = 1.0,
    responses: int = 8,
    verdict: str | None = None,
    target: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Replay every policy on traces and show it on one HTML page that needs no network, with its plots as PNGs.

    Args:
        traces: Folder made by `accept-head collect`, of prompts that nothing was trained or chosen on.
        draft: The draft that the traces were made with.
        out: HTML file to write; OUT.pareto.png and others go beside it.
        head: Heads to show; the setting of each comes from its decoding.json.
        tuned: File by `accept-head tune`: settings of the other policies, and costs if none are given here.
        costs: JSON file by `accept-head profile`.
        t_draft: Seconds of one draft forward, in place of `costs`.
        t_target: Seconds of one target forward.
        target_times: What if the target were so many times as slow?
        responses: Responses whose rounds are shown one by one, from all domains in turn.
        verdict: summary.json by `accept-head fit`, on whose verdict the page begins.
        target: The target that the traces were made with, to show the informed bound, as for `tune`; with an EAGLE-3
            drafter also where its tokenizer is, if not where it was.
        max_prompts: Use the first so many traces.
        seed: Seed of the bootstrap.
        dtype: float32, bfloat16, float16, or auto; of the models.
        trust_remote_code: Run model code that comes with the models.
    """
    path = writable_file(Path(out))
    choices = read_json(Path(tuned)) if tuned else {}
    if tuned and not isinstance(choices.get("policies"), list):
        raise InputError(f"--tuned {tuned}: field 'policies' is missing; accept-head tune writes such a file")
    if responses < 0:
        raise InputError(f"responses is {responses}, expected a number, 0 or more")
    given = costs is not None or t_draft is not None or t_target is not None
    priced = read_costs(costs if given else tuned, t_draft, t_target, target_times)
    model = load_draft(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
    config = finished_config(Path(traces))
    if config.depths:  # an EAGLE-3 drafter has no tokenizer of its own
        tokenizer = load_tokenizer(target or config.target, "--target", trust_remote_code)
    else:
        tokenizer = load_tokenizer(draft, "--draft", trust_remote_code)
    fingerprint = checkpoint_fingerprint(draft)
    heads = load_heads(head or [], model)
    load_target = target_loader(Path(traces), target, dtype, trust_remote_code)
    settings = read_choices(list(heads), choices)
    longest = max([LONGEST, *(choice.get("k_max", 0) for choice in settings.values())])
    coupled = load_coupled(Path(traces), model, fingerprint, k_max=longest, max_prompts=max_prompts)
    truth = informed_tables(coupled, model, load_target)
    data = build_report(
        coupled, heads, priced, tokenizer, chosen=settings, truth=truth,
        responses=responses, seed=seed, command=command_line(), verdict=_verdict(verdict),
    )  # fmt: skip
    for file in write_report(data, path):
        print(f"wrote {file}")


def _verdict(file: str | None) -> dict[str, Any] | None:
    if file is None:
        return None
    verdict = read_json(Path(file)).get("verdict")
    if not isinstance(verdict, dict) or not {"use", "names", "text"} <= set(verdict):
        raise InputError(f"--verdict {file}: field 'verdict' is missing; accept-head fit writes such a file")
    return verdict
