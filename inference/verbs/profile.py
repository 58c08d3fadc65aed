"""`accept-head profile`: what a forward costs on this machine, by the paper's regression and by the batch model.

Measurements of one pair, over the cache and the loop that decoding uses:
rounds   T = t_draft·N_draft + t_target·N_target (eq. 3.1), least squares over real rounds of different draft lengths:
         wall clock, so each forward carries its share of the loop
forward  medians of bare forwards: what a loop without any overhead would take
batch    t = α·(context tokens) + β·(batch tokens) + γ for each model (AdaSpec eq. 2), over batch × context × width;
         with a batch map, β and γ are those of its rounds, which hold the loop's overhead, and α is that of forwards
map      if asked for: medians of real rounds over batch size × draft length, and the table made of them
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import writable_file, write_json
from accept_head.inference.costs.batch_table import vllm_option
from accept_head.inference.engine.cache import Compile
from accept_head.inference.profile.batch_map import map_table, map_values, planned_map
from accept_head.inference.profile.device import conditions
from accept_head.inference.profile.forwards import fit_batch_cost, measure_forwards
from accept_head.inference.profile.prompts import read_prompts
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.profile.rounds import fit_round_costs, measure_rounds
from accept_head.inference.verbs.options import explained
from accept_head.pair import load_pair
from accept_head.sampling import Sampling


@explained
def profile(
    target: str,
    draft: str,
    out: str = "costs.json",
    prompts: str | None = None,
    field: str = "prompt",
    max_prompts: int | None = None,
    max_new_tokens: int = 48,
    temperature: float = 0.0,
    top_k: int = 50,
    batch_map: str | None = None,
    batch_sizes: list[int] | None = None,
    draft_lengths: list[int] | None = None,
    dtype: str = "auto",
    compile: Compile = "none",
    trust_remote_code: bool = False,
) -> None:
    """Measure what draft and target forwards cost on this machine, and write them as JSON.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's tokenizer.
        out: JSON file to write.
        prompts: JSONL file or data set to decode; built-in texts when left out.
        field: Field of a prompt record.
        max_prompts: Of `prompts`, how many to decode at each draft length; 16 when left out.
        max_new_tokens: Longest response, in tokens.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept when sampling.
        batch_map: JSON file to write, too: the draft length that suits each batch size, from rounds of all of them.
        batch_sizes: Batch sizes to measure for it, 1 among them; 1 2 4 8 16 32 when left out.
        draft_lengths: Draft lengths to measure for it, 0 among them; 0 1 2 3 4 6 8 when left out.
        dtype: float32, bfloat16, float16, or auto.
        compile: {compile} Costs are those of decoding with the same option.
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    path = writable_file(Path(out))
    plan = planned_map(batch_map, path, batch_sizes, draft_lengths, max_new_tokens)
    if max_prompts is not None and prompts is None:
        raise InputError("--max_prompts is given, but no --prompts that it could be of")
    pair = load_pair(target, draft, dtype=dtype, trust_remote_code=trust_remote_code)
    ids = read_prompts(pair, prompts, field, max_prompts)
    sampling = Sampling(temperature=temperature, top_k=top_k)
    decoding: Any = {"sampling": sampling, "max_new_tokens": max_new_tokens, "compile": compile}
    fit = regress_rounds(pair, ids, **decoding)
    forward = measure_forwards(pair, ids, compile=compile)
    batch = {
        name: fit_batch_cost(model, compile=compile) for name, model in (("draft", pair.draft), ("target", pair.target))
    }
    how = conditions(target, draft, pair, compile)
    grid = None
    if plan:
        grid = measure_rounds(pair, ids, plan.batch_sizes, plan.draft_lengths, **decoding)
        batch = fit_round_costs(grid, **batch)
        write_json(plan.path, map_values(grid) | {"sampling": asdict(sampling)} | how)
    write_json(
        path,
        {
            **asdict(fit.costs),
            "r_squared": fit.r_squared,
            "rounds": fit.rounds,
            "forward": asdict(forward),
            "batch": {name: asdict(cost) for name, cost in batch.items()},
            **how,
        },
    )
    costs = fit.costs
    print(
        f"t_draft {1e3 * costs.t_draft:.2f} ms, t_target {1e3 * costs.t_target:.2f} ms, target alone "
        f"{1e3 * costs.t_autoregressive:.2f} ms (c = {costs.ratio:.3f}); R² {fit.r_squared:.3f} of {fit.rounds} rounds"
    )
    for name, cost in batch.items():
        print(
            f"{name}: {1e9 * cost.alpha:.1f} ns a context token, {1e6 * cost.beta:.1f} µs a batch token, "
            f"{1e3 * cost.gamma:.2f} ms a forward (R² {cost.r_squared:.3f})"
        )
    print(f"wrote {path}")
    if plan and grid:
        make_console().print(map_table(grid))
        option = vllm_option(grid.table, draft)
        print(f"vllm serve … {option}" if option else "nothing is gained by speculation at any of these batch sizes")
        print(f"wrote {plan.path}")
