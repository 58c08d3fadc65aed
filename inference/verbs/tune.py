"""`accept-head tune`: which threshold, which bounds? Every setting is replayed on coupled traces and priced in seconds.

The policies that need no training go through the same search on the same traces, so that a comparison is fair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import writable_file, write_json
from accept_head.head.origin import check_unseen
from accept_head.hub.folder import head_folder
from accept_head.inference.costs.files import pair_costs, read_costs
from accept_head.inference.replay.coupled import LONGEST, load_coupled
from accept_head.inference.replay.truth import informed_tables, target_loader
from accept_head.inference.tune.files import decoding, decoding_files, write_tuned
from accept_head.inference.tune.grid import Search, checked_grid
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.tune.objectives import Objective
from accept_head.inference.tune.search import search_all
from accept_head.inference.tune.table import remarks, tuned_table
from accept_head.pair import load_draft
from accept_head.trace.shards import finished_config


def tune(
    traces: str,
    draft: str,
    out: str = "tuned.json",
    head: list[str] | None = None,
    costs: str | None = None,
    t_draft: float | None = None,
    t_target: float | None = None,
    target_times: float = 1.0,
    k_min: list[int] | None = None,
    k_max: list[int] | None = None,
    lag: list[int] | None = None,
    rules: list[str] | None = None,
    search: Search | None = None,
    objective: Objective = "mean",
    target: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Choose thresholds and bounds by replay on traces that no head was trained on, for given forward costs.

    The first run on a trace folder lets the draft roll out what follows each rejection and keeps that beside the
    traces; from then on other heads, costs and grids take seconds.

    Args:
        traces: Folder made by `accept-head collect`, of prompts that the heads were not trained on.
        draft: The draft that the traces were made with.
        out: JSON file to write: all tuned policies, every fixed draft length and the oracle, compared.
        head: Heads to tune. A local folder gets a `decoding.json` with the choice.
        costs: JSON file by `accept-head profile`.
        t_draft: Seconds of one draft forward, in place of `costs`.
        t_target: Seconds of one target forward.
        target_times: What if the target were so many times as slow? Nothing else changes.
        k_min: Fewest tokens after which a rule may stop, to try; 1 and 2 when left out.
        k_max: Most tokens of a round, to try; 4, 8 and 20 when left out.
        lag: Lags to try for a head that reads the state at a drawn token; 0 and 1 when left out.
        rules: Policies without training to tune, by name; all of them when left out, which takes a minute or two.
        search: How heads are tuned. `cost`: the threshold at which one more token just pays for itself, with k_min 1
            and the largest k_max; for the objective `mean`; `k_min` is then of the rules alone. `grid`: every threshold
            at all bounds. When left out: `grid` where `k_min` or another objective are given, else `cost`.
        objective: `mean`: tokens/s over all traces; `worst-domain`: tokens/s in the domain where that is lowest;
            `discard`: least drafted in vain at no more target calls than the best fixed length, of which 97.5 % of
            resamples of the prompts must agree.
        target: The target that the traces were made with, to add the informed bound: what a policy could reach that
            knows how likely each token is accepted. Asked once; what it said is kept beside the traces.
        max_prompts: Use the first so many traces.
        seed: Seed of the bootstrap.
        dtype: float32, bfloat16, float16, or auto; of the models.
        trust_remote_code: Run model code that comes with the models.
    """
    path = writable_file(Path(out))
    priced = read_costs(costs, t_draft, t_target, target_times)
    config = finished_config(Path(traces))
    of_drafter: dict[str, Any] = {"longest": config.depths, "divergence": False} if config.depths else {}
    grid = checked_grid(k_min, k_max, lag, rules, search, objective, has_heads=bool(head), **of_drafter)
    if max_prompts is not None and max_prompts < 1:
        raise InputError(f"max_prompts is {max_prompts}, expected a positive integer")
    model = load_draft(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
    fingerprint = checkpoint_fingerprint(draft)
    heads = load_heads(head or [], model)
    if lag is not None and all(each.config.reads == "before" for each in heads.values()):
        raise InputError(f"lag is {lag}, which only a --head that reads the state at a drawn token has: there is none")
    for name in heads:
        check_unseen(name, head_folder(name), Path(traces), config)
    load_target = target_loader(Path(traces), target, dtype, trust_remote_code)
    files = decoding_files(heads)
    longest = max(LONGEST, *grid.k_max)
    coupled = load_coupled(Path(traces), model, fingerprint, k_max=longest, max_prompts=max_prompts)
    truth = informed_tables(coupled, model, load_target)
    # What a policy of this file predicts, as it will where it decodes; a target that is only imagined has no file.
    real = costs if target_times == 1 else None
    pair = pair_costs(Path(real)) if real else None
    tuned = search_all(coupled, heads, priced, grid, objective, pair, truth, seed=seed)
    rows = tuned.rows(seed, real)
    write_tuned(path, tuned, rows)
    for name, file in files.items():
        write_json(file, decoding(tuned, name, rows))
    console = make_console(unseen_width=132 if truth is None else 160)
    console.print(tuned_table(rows, tuned))
    for name in heads:
        elsewhere = f"{name} is not a local folder: its choice is in {path} only"
        console.print(f"wrote {files[name]}" if name in files else elsewhere, highlight=False)
    console.print(f"wrote {path}", highlight=False)
    for remark in remarks(rows, tuned):
        console.print(remark, highlight=False)
