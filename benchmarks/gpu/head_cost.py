"""Part (h). Question: what do the head and its signals add to a draft forward of a 1B model?

    share = (seconds of forward + draw + signals + head − seconds of forward + draw) ÷ seconds of forward

The draft has the shape of Llama 3.2 1B, random weights, bf16, a vocabulary of 128,256. Each of the three is captured as
one CUDA graph, and they are replayed in turns: the difference has the caches as a forward leaves them, and not a head
whose weights lie there from the last replay. Beside it: the same launched one by one (eager), with kernels that begin
when those ahead of them have ended (late), and with torch's operations in place of the kernels of signals and head. The
bytes say what no kernel can go below: a head that is read once for each forward costs at least its share of the bytes.

python benchmarks/gpu/head_cost.py [--batches 1 8 32] [--temperatures 0 1] [--replays 100] [--tiny]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from cells import Cell, open_cells, part_parser
from recorded_loop import random_head
from shapes import LLAMA_32_1B, SMALL_DRAFT, build

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.steps import step_of
from accept_head.inference.engine.attention.choice import choose
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.proof import check_served
from accept_head.inference.kernels import launch, signals, usable
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import OF_Q, DraftStep
from accept_head.pair import Forward, hidden_size, output_size
from accept_head.sampling import draw

CONTEXT_TOKENS = 512
K_MAX = 8
BATCHES, TEMPERATURES = (1, 8, 32), (0.0, 1.0)
CELL_SECONDS = 5  # a guess
AIM = "default"  # the head that the aim is about, in graphs, with kernels: at its worst batch size and temperature
Call = Callable[[], object]


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--replays", type=int, default=100, help="of each graph, in turns")
    options = parser.parse_args()
    return run(options)


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    cells, _ = open_cells("head_cost", options, context_tokens=CONTEXT_TOKENS, head_of_the_aim=AIM)
    draft = build(SMALL_DRAFT if options.tiny else LLAMA_32_1B, dtype=torch.float32 if options.tiny else torch.bfloat16)
    on_gpu = draft.device.type == "cuda"
    kernels = usable.usable(torch.empty(0, device=draft.device), signals.CHECK)
    check_served(draft, "auto")
    backend = choose(draft, "auto")
    without = [] if on_gpu else ["no CUDA device: eager only"]
    without += [] if kernels else ["no Triton on a GPU: torch's operations only"]
    cells.write(attention=backend.name if backend else "sdpa", fallback="; ".join(without) or None)
    # What the aim is about comes first.
    modes = itertools.product(modes_of(on_gpu, kernels), options.temperatures, options.batches)
    for (mode, way), temperature, batch in modes:
        settings = {"batch": batch, "temperature": temperature, "mode": mode, "way": way}
        settings |= {"replays": options.replays, "attention": cells.settings["attention"]}
        name = f"{mode}, {way}, batch {batch}, temperature {temperature:g}"
        scene = Scene(draft, batch, Sampling(temperature=temperature), options.tiny)
        cells.measure(name, settings, lambda s=settings, c=scene: measure(c, **_of(s)), needs=CELL_SECONDS)
    return cells.status


def modes_of(on_gpu: bool, kernels: bool) -> list[tuple[str, str]]:
    """How calls are made, and by what; what is used where it can be comes first."""
    early = kernels and launch.early_options(torch.device("cuda", torch.cuda.current_device()))["EARLY"]
    ways = [*(["kernels"] if kernels else []), *(["late kernels"] if early else []), "torch"]
    modes = itertools.product(["graph", "eager"] if on_gpu else ["eager"], ways)
    return [each for each in modes if each != ("eager", "late kernels")]  # where launching takes longer than either


def _of(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("mode", "way", "replays")}


@dataclass(frozen=True)
class Scene:
    draft: Any
    batch: int
    sampling: Sampling
    tiny: bool


@torch.no_grad()
def measure(scene: Scene, mode: str, way: str, replays: int) -> Cell:
    """Seconds of a forward, and what is added to it by signals alone and by each head with what it reads."""
    with _kernels(way, scene.draft.device):
        heads = {name: HeadPolicy(head, 0.5, k_max=K_MAX) for name, head in make_heads(scene.draft).items()}
        forward = _forward(scene)
        processing = Processing(scene.sampling, output_size(scene.draft))
        number = torch.full((scene.batch,), 0.5, device=scene.draft.device)
        active = torch.ones(scene.batch, dtype=torch.bool, device=scene.draft.device)  # as the loop has it

        def drawn() -> tuple[Forward, torch.Tensor, torch.Tensor | None, torch.Tensor]:
            fed = forward()
            scores = fed.logits[:, 0]
            q = None if scene.sampling.greedy else processing.probabilities(scores)
            return fed, scores, q, scores.argmax(-1) if q is None else draw(q, number)

        def step(needs: frozenset[Any]) -> tuple[DraftStep, torch.Tensor]:
            fed, scores, q, ids = drawn()
            of = processing.signal_probabilities(scores, q) if needs & OF_Q else scores
            # The state at the drawn token is another forward's: any state will do for the time that it takes.
            return replace(step_of(needs, 1, ids, active, of, fed), drawn_hidden=fed.hidden[:, 0]), ids

        calls: dict[str, Call] = {"forward": forward, "drawn": drawn, "signals": lambda: step(OF_Q)}
        for name, policy in heads.items():
            calls[name] = lambda p=policy: p.score(step(p.reads)[0])
        seconds = _in_turns({name: _made(call, mode) for name, call in calls.items()}, replays, scene.draft.device)
    base = statistics.median(seconds["forward"])
    added = {}
    for name in ("signals", *heads):
        differences = [one - other for one, other in zip(seconds[name], seconds["drawn"], strict=True)]
        low, middle, high = statistics.quantiles(differences, n=4)
        added[name] = {"seconds": middle, "quartiles": [low, high], "share": middle / base}
    for name, policy in heads.items():
        added[name]["bytes"] = head_bytes(policy.head, scene)
        added[name]["share_of_bytes"] = added[name]["bytes"] / forward_bytes(scene)
    return {
        "forward_seconds": base,
        "draw_seconds": statistics.median(seconds["drawn"]) - base,
        "added": added,
        "forward_bytes": forward_bytes(scene),
        "default_share": added[AIM]["share"],
    }


def make_heads(draft: Any) -> dict[str, AcceptanceHead]:
    """`default`: what `accept-head train` makes; `paper`: SpecDec++'s, three blocks as wide as the state."""
    torch.manual_seed(0)
    paper = AcceptanceHead(HeadConfig(hidden_size=hidden_size(draft), depth=3))
    return {"default": random_head(draft), "paper": paper.to(draft.device).eval().requires_grad_(False)}


def head_bytes(head: AcceptanceHead, scene: Scene) -> int:
    """Of the weights, as a forward of this dtype reads them, and of the logits of a batch."""
    weights = sum(parameter.numel() for parameter in head.parameters()) * scene.draft.dtype.itemsize
    return weights + scene.batch * output_size(scene.draft) * scene.draft.dtype.itemsize


def forward_bytes(scene: Scene) -> int:
    """Of the draft's weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in scene.draft.parameters())


def _forward(scene: Scene) -> Callable[[], Forward]:
    length = 16 if scene.tiny else CONTEXT_TOKENS
    cached = CachedModel(scene.draft, scene.batch, length + K_MAX, with_hidden=True, attention="auto")
    ids = torch.randint(3, output_size(scene.draft), (scene.batch, length + 1), device=scene.draft.device)
    cached.fill(ids, range(scene.batch), [0] * scene.batch, [length] * scene.batch)
    starts = torch.full((scene.batch,), length, device=scene.draft.device)
    new = ids[:, -1:].contiguous()
    return lambda: cached.forward(new, starts, length)


@contextmanager
def _kernels(way: str, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if way == "late kernels":
            stack.enter_context(patch.dict(launch._early, {device: False}))
        if way == "torch":
            stack.enter_context(patch.object(usable, "_enabled", lambda: False))
        yield


def _made(call: Call, mode: str) -> Call:
    """Warmed up; and, in graphs, its replay."""
    for _ in range(3):
        call()
    if mode == "eager":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _in_turns(calls: dict[str, Call], replays: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every call, in turns, so that a slower moment touches all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(replays + 5):
        for name, call in calls.items():
            timed = _seconds(call, device)
            if turn >= 5:
                seconds[name].append(timed)
    return seconds


def _seconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
