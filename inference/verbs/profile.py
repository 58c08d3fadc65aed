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

import datetime
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PreTrainedModel

from accept_head.console import make_console
from accept_head.cost import BatchForwardCost, ForwardCosts
from accept_head.errors import InputError
from accept_head.files import writable_file, write_json
from accept_head.inference.costs.batch_table import FIELD, vllm_option
from accept_head.inference.decode.generate import GREEDY, make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.cache import CachedModel, Compile
from accept_head.inference.engine.proof import check_served
from accept_head.inference.policies import FixedPolicy
from accept_head.inference.profile.rounds import (
    RoundGrid,
    check_rounds_fit,
    finish,
    fit_round_costs,
    measure_rounds,
    usable_prompts,
)
from accept_head.inference.verbs.options import explained
from accept_head.pair import Pair, context_tokens, load_pair
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling

WARM_UP, REPEATS = 5, 40
DRAFT_LENGTHS = (1, 2, 4, 8)  # that the regression is over
# Rounds that are further than this from the median of their length are left out: somebody else had the processor. In
# units of the standard deviation, as the median absolute deviation gives it.
OUTLIER = 3.0
BATCHES, CONTEXTS, WIDTHS = (1, 2, 4, 8, 16), (32, 128, 256), (1, 2, 5)
MAP_BATCHES, MAP_LENGTHS = (1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 4, 6, 8)  # the grid of a batch map

# Used when no prompts are given: costs depend on lengths, hardly on words.
TEXTS = (
    "Speculative decoding lets a small draft model propose several tokens, which a large target verifies in one pass.",
    "Accepted tokens are kept, the first rejected one is drawn again, and the output keeps the target's distribution.",
    "How many tokens to propose is a guess, and the best guess changes from word to word, and from text to text.",
    "def cost(drafts, targets, t_draft, t_target):\n    return drafts * t_draft + targets * t_target\n",
)


@dataclass(frozen=True, kw_only=True)
class Regression:
    """costs: by least squares of eq. 3.1. r_squared: of the fit over `rounds` rounds."""

    costs: ForwardCosts
    r_squared: float
    rounds: int


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
    map_path = _map_path(batch_map, path, batch_sizes, draft_lengths)
    sizes = _axis("batch_sizes", batch_sizes, MAP_BATCHES, 1)
    lengths = _axis("draft_lengths", draft_lengths, MAP_LENGTHS, 0)
    if map_path:
        check_rounds_fit(lengths[-1], max_new_tokens)
    if max_prompts is not None and prompts is None:
        raise InputError("--max_prompts is given, but no --prompts that it could be of")
    pair = load_pair(target, draft, dtype=dtype, trust_remote_code=trust_remote_code)
    if prompts:
        most = 16 if max_prompts is None else max_prompts
        ids = [prompt.ids for prompt in load_prompts(prompts, pair.tokenizer, field=field, max_prompts=most)]
    else:
        ids = [tuple(pair.tokenizer(text)["input_ids"]) for text in TEXTS]
    sampling = Sampling(temperature=temperature, top_k=top_k)
    decoding: Any = {"sampling": sampling, "max_new_tokens": max_new_tokens, "compile": compile}
    fit = regress_rounds(pair, ids, **decoding)
    forward = measure_forwards(pair, ids, compile=compile)
    batch = {
        name: fit_batch_cost(model, compile=compile) for name, model in (("draft", pair.draft), ("target", pair.target))
    }
    conditions = {
        "target": target,
        "draft": draft,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "compile": compile,
        "device": device_name(pair.target.device),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("accept-head", "torch", "transformers")},
        "date": datetime.date.today().isoformat(),
    }
    grid = None
    if map_path:
        grid = measure_rounds(pair, ids, sizes, lengths, **decoding)
        batch = fit_round_costs(grid, **batch)
        write_json(map_path, map_values(grid) | {"sampling": asdict(sampling)} | conditions)
    write_json(
        path,
        {
            **asdict(fit.costs),
            "r_squared": fit.r_squared,
            "rounds": fit.rounds,
            "forward": asdict(forward),
            "batch": {name: asdict(cost) for name, cost in batch.items()},
            **conditions,
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
    if grid:
        make_console().print(map_table(grid))
        option = vllm_option(grid.table, draft)
        print(f"vllm serve … {option}" if option else "nothing is gained by speculation at any of these batch sizes")
        print(f"wrote {map_path}")


def _map_path(batch_map: str | None, out: Path, *axes: list[int] | None) -> Path | None:
    if batch_map is None:
        if any(values is not None for values in axes):
            raise InputError("batch_sizes and draft_lengths are of a batch map: give --batch_map FILE")
        return None
    path = writable_file(Path(batch_map), "--batch_map")
    if path.resolve() == out.resolve():
        raise InputError(f"--batch_map {batch_map}: is the file of the costs, expected another one")
    return path


def _axis(name: str, values: list[int] | None, default: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Ascending. Raises InputError when it does not begin at `first`: nothing can be interpolated below."""
    axis = tuple(sorted(set(default if values is None else values)))
    if not axis or axis[0] != first:
        raise InputError(f"{name} are {list(axis)}, expected {first} and larger numbers")
    return axis


def regress_rounds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 48,
    compile: Compile = "none",
) -> Regression:
    """Decode prompts one at a time with several fixed draft lengths, in turns, and fit eq. 3.1 to the rounds.

    Raises InputError when no prompt leaves room for a response of max_new_tokens.
    """
    usable = usable_prompts(pair, prompts, max_new_tokens)
    policies = [FixedPolicy(k) for k in (0, *DRAFT_LENGTHS)]
    options: Any = {"batch_size": 1, "greedy": sampling.greedy, "compile": compile}
    decoder = make_decoder(pair.target, pair.draft, make_requests(usable, max_new_tokens), policies[-1], **options)
    processing = Processing(sampling, pair.vocab_size)
    # What is captured or compiled when it is first met is met now: the same rounds come again.
    warm_up = usable[:1] if compile == "none" else usable
    seconds: dict[int, list[float]] = {}  # of rounds, by tokens drafted
    for index, prompt in enumerate([*warm_up, *usable]):
        for policy in policies:
            for drafted, elapsed in _timed_rounds(decoder, prompt, policy, processing, max_new_tokens):
                if index >= len(warm_up):
                    seconds.setdefault(drafted, []).append(elapsed)
    if 0 not in seconds or len(seconds) < 3:
        raise InputError(f"max_new_tokens is {max_new_tokens}: too few rounds of different lengths to fit; give more")
    alone = statistics.median(seconds.pop(0))
    kept = {k: _without_outliers(times) for k, times in seconds.items()}
    lengths = np.array([k for k, times in kept.items() for _ in times], dtype=float)
    measured = np.array([elapsed for times in kept.values() for elapsed in times])
    (t_draft, t_target), r_squared = _least_squares(np.stack([lengths, np.ones_like(lengths)], axis=1), measured)
    if min(t_draft, t_target) <= 0:
        raise InputError(
            f"the {len(measured)} rounds are too few or too noisy to fit (t_draft would be {t_draft:.2g} s); "
            "give more prompts, or a larger max_new_tokens"
        )
    costs = ForwardCosts(t_draft=t_draft, t_target=t_target, t_autoregressive=alone)
    return Regression(costs=costs, r_squared=r_squared, rounds=len(measured))


def _without_outliers(times: Sequence[float]) -> list[float]:
    median = statistics.median(times)
    deviation = 1.4826 * statistics.median(abs(elapsed - median) for elapsed in times)
    return [elapsed for elapsed in times if abs(elapsed - median) <= OUTLIER * deviation]


def _timed_rounds(
    decoder: Decoder, prompt: Sequence[int], policy: FixedPolicy, processing: Processing, max_new_tokens: int
) -> list[tuple[int, float]]:
    """(tokens drafted, seconds) of each round but the first, which has the prefill in it."""
    device = decoder.target.model.device
    clock: list[float] = []
    drafted: list[int] = []

    def watch(round_: Round) -> None:
        drafted.append(int(round_.outcome.drafted.sum()))
        finish(device)
        clock.append(time.perf_counter())

    requests = make_requests([prompt], max_new_tokens)
    never = Stopping([], [], device)
    for _ in decoder.run(requests, policy=policy, processing=processing, stopping=never, watch=watch):
        pass
    spans = np.diff(clock).tolist()
    return list(zip(drafted[1:], spans, strict=True))


def map_values(grid: RoundGrid) -> dict[str, Any]:
    """A batch map as a file has it: the table by vLLM's name, and what it was made of. acceptance: of a token whose
    predecessors were accepted. al: tokens a round of 0, 1, 2, … draft tokens. goodput: tokens/s of one row."""
    return {
        FIELD: [list(row) for row in grid.table],
        "batch_sizes": list(grid.batch_sizes),
        "draft_lengths": list(grid.draft_lengths),
        "round_seconds": grid.seconds.tolist(),
        "rounds": grid.rounds.tolist(),
        "context_tokens": grid.context_tokens.tolist(),
        "acceptance": grid.acceptance.tolist(),
        "at_risk": grid.at_risk.tolist(),
        "al": grid.tokens.tolist(),
        "goodput": grid.goodput.tolist(),
    }


def map_table(grid: RoundGrid) -> Table:
    """For a terminal: tokens/s of a row at every measured batch size and draft length, and what to draft."""
    table = Table(title="tokens/s of one row, by batch size and draft tokens")
    for name in ("batch size", *map(str, grid.draft_lengths), "to draft"):
        table.add_column(name, justify="right")
    chosen = {size: k for first, last, k in grid.table for size in range(first, last + 1)}
    for size, row in zip(grid.batch_sizes, grid.goodput, strict=True):
        best = row.argmax()
        cells = (f"[bold]{value:.1f}[/bold]" if place == best else f"{value:.1f}" for place, value in enumerate(row))
        table.add_row(str(size), *cells, str(chosen[size]))
    return table


@torch.no_grad()
def measure_forwards(
    pair: Pair, prompts: Sequence[Sequence[int]], *, verify_tokens: int = 4, compile: Compile = "none"
) -> ForwardCosts:
    """Median seconds, after real prompts at batch 1, of bare forwards: a draft step (1 token), a verification
    (verify_tokens + 1 tokens) and a step of the target alone (1 token).

    They are timed in turns, so that a slower or faster moment of the machine touches all alike. Raises InputError
    when the context is too short for a verification.
    """
    width = verify_tokens + 1
    usable = usable_prompts(pair, prompts, width)
    longest = max(len(prompt) for prompt in usable)
    device = pair.target.device
    draft, target = (_as_decoding(model, 1, longest + width, compile) for model in (pair.draft, pair.target))
    seconds: dict[str, list[float]] = {"t_draft": [], "t_target": [], "t_autoregressive": []}
    for step in range(WARM_UP + REPEATS):
        prompt = torch.tensor([usable[step % len(usable)]], device=device)
        for model in (draft, target):
            model.fill(prompt, [0], [0], [prompt.shape[1]])
        new = prompt[:, -1:].expand(1, width)
        timed = {
            "t_draft": _seconds(draft, new[:, :1], prompt.shape[1]),
            "t_target": _seconds(target, new, prompt.shape[1]),
            "t_autoregressive": _seconds(target, new[:, :1], prompt.shape[1]),
        }
        if step >= WARM_UP:
            for name, value in timed.items():
                seconds[name].append(value)
    return ForwardCosts(**{name: statistics.median(values) for name, values in seconds.items()})


@torch.no_grad()
def fit_batch_cost(model: PreTrainedModel, *, repeats: int = 5, compile: Compile = "none") -> BatchForwardCost:
    """α, β, γ of AdaSpec's eq. 2, least squares over medians of forwards at every batch × context × width that fits."""
    room = context_tokens(model) - max(WIDTHS)
    contexts = [context for context in CONTEXTS if context <= room] or [max(1, room)]
    features, measured = [], []
    for batch in BATCHES:
        cached = _as_decoding(model, batch, max(contexts) + max(WIDTHS), compile)
        ids = torch.ones(batch, max(contexts), dtype=torch.long, device=model.device)
        cached.fill(ids, range(batch), [0] * batch, [max(contexts)] * batch)
        for context in contexts:
            for width in WIDTHS:
                times = [_seconds(cached, ids[:, :1].expand(batch, width), context) for _ in range(repeats + 1)][1:]
                features.append((batch * context, batch * width, 1))
                measured.append(statistics.median(times))
    (alpha, beta, gamma), r_squared = _least_squares(np.array(features, dtype=float), np.array(measured))
    return BatchForwardCost(alpha=alpha, beta=beta, gamma=gamma, r_squared=r_squared)


def _as_decoding(model: PreTrainedModel, batch: int, max_length: int, compile: Compile) -> CachedModel:
    """With the attention that decoding chooses."""
    check_served(model, "auto")
    return CachedModel(model, batch, max_length, attention="auto", compile=compile)


def device_name(device: torch.device) -> str:
    """The processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")  # where Linux tells it
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _least_squares(features: np.ndarray, measured: np.ndarray) -> tuple[list[float], float]:
    """Coefficients and R². features: (n, coefficients); measured: (n,)."""
    coefficients, *_ = np.linalg.lstsq(features, measured, rcond=None)
    unexplained = np.square(measured - features @ coefficients).sum()
    total = np.square(measured - measured.mean()).sum()
    return [float(value) for value in coefficients], float(1 - unexplained / total) if total > 0 else 1.0


def _seconds(model: CachedModel, new: torch.Tensor, start: int) -> float:
    starts = torch.full((len(new),), start, device=new.device)
    if model.static:  # what is captured or compiled when it is first met
        model.forward(new, starts, start, lend=True)
    finish(new.device)
    begin = time.perf_counter()
    model.forward(new, starts, start, lend=True)
    finish(new.device)
    return time.perf_counter() - begin
