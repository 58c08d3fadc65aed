"""Part (a). Question: how far is the decode loop from the time of its forwards alone, at the sizes that users run?

    overhead = wall ÷ Σ forwards at their floor,  Σ = Σ_rounds [ N_draft·t_draft + t_target(width of the round) ]

Target and draft of the shapes of Llama 3 8B and Llama 3.2 1B, random weights, bf16; what is accepted, and what the
head says, is recorded of a published pair (recorded_rounds.py), so that lengths are realistic. A floor is the median
of one forward alone over a cache that is half filled, replayed as a CUDA graph between two events; on a CPU, by the
clock. Nothing that a forward does not do is in the floor: sampling, signals, head, policy, verification and
bookkeeping all count as overhead.

A policy decodes wave after wave of as many requests as there are rows, in one run. Wall is of rounds in which all rows
are live, without the first of a wave, which has the prompts in it; without the first wave, a warm-up; and without
rounds in which a graph was captured, which are counted beside it.

As all policies see the same acceptance, their tokens per second compare them at these sizes by the clock. `head` has
the threshold that suits one request; beside it are costs of the floors, and costs that it learns. `switches` are cells
in which one thing is turned off: what it earns is their wall over that of the cell with everything on.

`--liger` measures models whose norms, rotary embeddings and gates are Liger's kernels (`pip install liger-kernel`), in
a file of its own.

python benchmarks/gpu/overhead.py [--batches 1 8 32 128] [--temperatures 0 1] [--switches 1 32] [--liger] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from cells import Cell, open_cells, part_parser
from graph_modes import captures, modes
from recorded_loop import RecordedDecoder, RecordedHead, random_head, recorded_requests
from recorded_rounds import K_MAX, RECORDED, RecordedRounds
from shapes import build_pair

from accept_head import Sampling
from accept_head.cost import BatchForwardCost, PairCosts
from accept_head.inference.bench.figures import TWIN
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.attention.choice import choose
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.memory import plan_memory
from accept_head.inference.engine.proof import check_served
from accept_head.inference.kernels import head as kernels_of_head
from accept_head.inference.kernels import usable
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policy import DraftPolicy
from accept_head.inference.profile.device import finish
from accept_head.pair import Pair

PROMPT_TOKENS = 256
TOP_K = 50
BATCHES = (1, 8, 32, 128)
LENGTHS = (1, 2, 3, 4, 6, K_MAX)  # without the longest it is not known which is best
TWICE, AUTO, FLOORS = "fixed:2", "head, costs=auto", "head, costs of the floors"
POLICIES = ("none", *map("fixed:{}".format, LENGTHS), TWICE + TWIN, "head", FLOORS, AUTO)
SWITCHED = ("head",)
TINY = ("none", f"fixed:{K_MAX}", "head", FLOORS, AUTO)
REPLAYS = 20  # of a floor
WAVES = {1: 8}  # that count, of a policy; 2 for other sizes
FLOOR_SECONDS = 6  # guesses of what a cell takes
LOOP_SECONDS = {1: 90, 8: 50, 32: 50, 128: 60}
SWITCHED_SECONDS = 15
KERNELS = ("signals", "the head", "sampling", "verification", "the loop")  # as Check names them


@dataclass(frozen=True)
class Scene:
    """What the cells share. record: on the device."""

    pair: Pair
    head: Any
    record: RecordedRounds
    sampling: Sampling
    prompt_tokens: int
    tiny: bool

    @property
    def half(self) -> int:
        """Tokens of a row in the middle of its response."""
        return self.prompt_tokens + self.record.tokens // 2


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", help="1 8 32 128 when left out")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--switches", type=int, nargs="*", default=[], help="batch sizes at which switches are turned")
    parser.add_argument("--liger", action="store_true", help="models with Liger's kernels")
    options = parser.parse_args()
    return run(options)


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    names = {0.0: "greedy", 1.0: "sampled"}
    records = {each: RecordedRounds.load(RECORDED / f"{name}.npz").shuffled() for each, name in names.items()}
    ways, without = modes()
    cells, _ = open_cells(
        "overhead_liger" if options.liger else "overhead",
        options,
        acceptance="recorded: traces of Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, and its heads drive what is "
        "accepted and what the head says; the models have random weights",
        sampling=f"top_k {TOP_K} at temperature 1, as people decode, whatever the records were sampled with",
        records={f"{temperature:g}": record.about for temperature, record in records.items()},
        prompt_tokens=PROMPT_TOKENS,
        fallback=without,
    )
    pair = build_pair(options.tiny, liger=options.liger)
    head = random_head(pair.draft)
    batches = ([1, 3] if options.tiny else BATCHES) if options.batches is None else options.batches
    floors: dict[int, Cell] = {}

    def measured(batch: int, temperature: float, way: Way, policies: Sequence[str], name: str, needs: float) -> None:
        record = records[float(bool(temperature))].to(pair.target.device)
        sampling = Sampling(temperature=temperature, top_k=TOP_K if temperature else 0)
        scene = Scene(pair, head, record, sampling, 16 if options.tiny else PROMPT_TOKENS, options.tiny)
        if batch not in floors:  # a forward does not know the temperature
            floors[batch] = cells.measure(
                f"floor, batch {batch}, context {scene.half}",
                {"batch": batch},
                lambda: measure_floors(scene, batch),
                needs=FLOOR_SECONDS,
            )
        cells.measure(
            f"{name}, batch {batch}, temperature {temperature:g}",
            {"batch": batch, "temperature": temperature, "top_k": sampling.top_k, **settings_of(way)},
            lambda: measure_loop(scene, batch, way, floors[batch]["seconds"], policies),
            needs=needs,
            after=[floors[batch]],
        )
        clear()

    best = Way(ways[0])
    for batch, temperature in itertools.product(batches, options.temperatures):
        measured(
            batch, temperature, best, TINY if options.tiny else POLICIES, best.compile, LOOP_SECONDS.get(batch, 30)
        )
    for batch in options.switches:
        for name, way in switches(best, ways).items():
            measured(batch, 1.0, way, SWITCHED, f"switches, {name}", SWITCHED_SECONDS)
    return cells.status


@dataclass(frozen=True)
class Way:
    """How the loop runs. without: operations that torch does though there are kernels."""

    compile: str
    attention: str = "auto"
    without: tuple[str, ...] = ()


def settings_of(way: Way) -> dict[str, Any]:
    """As they are read from a file."""
    return asdict(way) | {"without": list(way.without)}


def switches(best: Way, others: Sequence[str]) -> dict[str, Way]:
    """Everything on, twice; then one thing off, or other than it is."""
    ways = {"all": best, "all" + TWIN: best}
    if best.compile == "graphs":
        ways |= {"no kernels": replace(best, without=KERNELS)}
        ways |= {f"no kernels for {name}": replace(best, without=(name,)) for name in KERNELS}
        ways |= {"attention sdpa": replace(best, attention="sdpa")}
    return ways | {each: Way(each) for each in others[1:]}


@contextmanager
def in_torch(operations: Sequence[str]) -> Iterator[None]:
    """Torch does these operations, whatever has kernels."""
    used, passes = usable.usable, usable.passes
    with ExitStack() as stack:
        if operations:
            served = lambda tensor, check: check.operation not in operations and used(tensor, check)  # noqa: E731
            for module in list(sys.modules.values()):
                if getattr(module, "usable", None) is used:
                    stack.enter_context(patch.object(module, "usable", served))
            passed = lambda check, device: check.operation not in operations and passes(check, device)  # noqa: E731
            stack.enter_context(patch.object(kernels_of_head, "passes", passed))
        yield


@torch.no_grad()
def measure_floors(scene: Scene, batch: int) -> Cell:
    """Seconds of one forward alone: of the draft on one token a row, of the target on 1 to K_MAX + 1."""
    length = scene.half
    seconds, how, attention = {}, set(), {}
    for role, model, widths in (("target", scene.pair.target, range(1, K_MAX + 2)), ("draft", scene.pair.draft, (1,))):
        # The attention of the loop that is measured: a slower one here would make it look better than it is.
        check_served(model, "auto")
        backend = choose(model, "auto")
        attention[role] = backend.name if backend else "sdpa"
        cached = CachedModel(model, batch, length + K_MAX + 1, with_hidden=role == "draft", attention="auto")
        ids = torch.randint(3, scene.pair.vocab_size, (batch, length + K_MAX + 1), device=model.device)
        cached.fill(ids, range(batch), [0] * batch, [length] * batch)
        starts = torch.full((batch,), length, device=model.device)
        for width in widths:
            new = ids[:, :width].contiguous()
            timed, way = floor_seconds(lambda n=new, c=cached, s=starts: c.forward(n, s, length), model.device)
            seconds[f"{role} {width}"] = timed
            how.add(way)
        del cached
    if on_gpu := [way for way in how if way.startswith("eager")]:
        raise RuntimeError(f"a floor with launches in it is none: {on_gpu[0]}")
    return {"seconds": seconds, "context_tokens": length, "timed": sorted(how), "attention": attention}


def floor_seconds(forward: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """Median seconds of one forward, and how it was timed."""
    for _ in range(3):
        forward()
    finish(device)
    if device.type != "cuda":
        times = []
        for _ in range(REPLAYS):
            begin = time.perf_counter()
            forward()
            times.append(time.perf_counter() - begin)
        return statistics.median(times), "clock, no device to wait for"
    call, way = forward, "CUDA graph"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        call = graph.replay
    except Exception as error:  # then with the launches in it, and said so
        way = f"eager, CUDA events: {type(error).__name__}: {error}"
        finish(device)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        finish(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times), way


def measure_loop(
    scene: Scene, batch: int, way: Way, floors: dict[str, float], policies: Sequence[str] = POLICIES
) -> Cell:
    """Every policy at this batch size, one after the other."""
    with in_torch(way.without):
        return _measure_loop(scene, batch, way, floors, policies)


def _measure_loop(scene: Scene, batch: int, way: Way, floors: dict[str, float], names: Sequence[str]) -> Cell:
    decoder = make_recorded(scene, batch, way)
    waves = 1 + (1 if scene.tiny else WAVES.get(batch, 2))
    policies = []
    for name in names:
        requests = [
            recorded_requests(
                scene.record,
                batch,
                prompt_tokens=scene.prompt_tokens,
                vocab_size=scene.pair.vocab_size,
                first=wave * batch,
            )
            for wave in range(waves)
        ]
        policy = make(name, decoder, scene, batch, floors)
        timed = decode(decoder, requests, policy, scene)
        believed = {"believed": policy.costs.believed()} if name == AUTO else {}
        policies.append({"policy": name, **timed.summary(floors), **believed})
    return {"policies": policies, "worst_overhead": max(row["overhead"] for row in policies)}


def make_recorded(scene: Scene, batch: int, way: Way) -> RecordedDecoder:
    pair = scene.pair
    plan = plan_memory(
        pair.target,
        pair.draft,
        batch=batch,
        max_length=scene.prompt_tokens + scene.record.tokens,
        max_draft_tokens=K_MAX,
        vocab_size=pair.vocab_size,
        greedy=scene.sampling.greedy,
        longest_prompt=scene.prompt_tokens,
        graphs=way.compile == "graphs",
    )
    plan.check_fits(pair.target.device)
    options: Any = {"compile": way.compile, "attention": way.attention}
    decoder = RecordedDecoder(pair.target, pair.draft, plan, **options)
    decoder.record, decoder.prompt_tokens = scene.record, scene.prompt_tokens
    return decoder


def make(name: str, decoder: RecordedDecoder, scene: Scene, batch: int, floors: dict[str, float]) -> Any:
    about = scene.record.about
    if name == "head":
        return RecordedHead(scene.head, about["threshold"], decoder, k_min=about["k_min"], k_max=about["k_max"])
    if name.startswith("head"):  # which ends a round by costs alone
        costs = LearntCosts() if name == AUTO else costs_of(floors, batch)
        return BatchStopPolicy(RecordedHead(scene.head, 1.0, decoder, k_min=1, k_max=about["k_max"]), costs)
    return FixedPolicy(0 if name == "none" else int(name.removesuffix(TWIN).partition(":")[2]))


def costs_of(floors: dict[str, float], batch: int) -> PairCosts:
    """The line through the target's narrowest and widest forward; of the draft there is one."""
    one, most = floors["target 1"], floors[f"target {K_MAX + 1}"]
    beta = max(0.0, most - one) / (K_MAX * batch)
    return PairCosts(
        draft=BatchForwardCost(alpha=0.0, beta=0.0, gamma=floors["draft 1"], r_squared=1.0),
        target=BatchForwardCost(alpha=0.0, beta=beta, gamma=one - beta * batch, r_squared=1.0),
    )


class Rounds:
    """The rounds that count. wall: their seconds; drafts, widths: of each, the draft forwards that it needed and the
    tokens a row that the target was given; tokens: that they emitted. captures: seconds of rounds that made graphs."""

    def __init__(self, waves: list[int], walls: list[float], counted: torch.Tensor, captures: list[float]):
        """waves: of each round. counted: (rounds, 3, rows) drafted, submitted and accepted tokens."""
        self.wall, self.captures = sum(walls), captures
        self.waves: dict[int, list[float]] = {}
        for wave, wall, tokens in zip(waves, walls, (counted[:, 2] + 1).sum(-1).tolist(), strict=True):
            sums = self.waves.setdefault(wave, [0, 0.0])
            sums[0], sums[1] = sums[0] + tokens, sums[1] + wall
        self.drafts = counted[:, 0].amax(-1).tolist()
        self.widths = (counted[:, 1].amax(-1) + 1).tolist()
        self.tokens = int((counted[:, 2] + 1).sum())

    def summary(self, floors: dict[str, float]) -> dict[str, Any]:
        drafting = sum(self.drafts) * floors["draft 1"]
        verifying = sum(floors[f"target {width}"] for width in self.widths)
        return {
            "overhead": self.wall / (drafting + verifying),
            "rounds": len(self.widths),
            "draft_forwards": sum(self.drafts),
            "tokens": self.tokens,
            "wall_seconds": self.wall,
            "forward_seconds": drafting + verifying,
            "tokens_per_second": self.tokens / self.wall,
            "tokens_and_seconds_of_waves": list(self.waves.values()),
            "overhead_ms_a_round": 1e3 * (self.wall - drafting - verifying) / len(self.widths),
            "rounds_with_captures": len(self.captures),
            "seconds_of_rounds_with_captures": sum(self.captures),
        }


def decode(decoder: RecordedDecoder, waves: list[list[Request]], policy: DraftPolicy, scene: Scene) -> Rounds:
    """One run over all waves; each begins when the one before it is done."""
    seen: list[tuple[int, int, float, torch.Tensor]] = []  # (wave, captures until then, clock, (3, rows) tokens)
    batch = len(waves[0])

    def arriving() -> Iterator[Request | None]:
        for wave in waves:
            yield from wave
            while decoder.rows.live_rows:
                yield None

    def watch(round_: Round) -> None:
        if None not in round_.rows.requests:
            outcome = round_.outcome
            tokens = torch.stack([outcome.drafted, outcome.submitted, outcome.accepted])
            wave = round_.rows.requests[0].index // batch  # type: ignore[union-attr]
            seen.append((wave, captures(), time.perf_counter(), tokens))

    device = scene.pair.target.device
    run = decoder.run(
        arriving(),
        policy=policy,
        processing=Processing(scene.sampling, scene.pair.vocab_size),
        stopping=Stopping([], [], device),
        watch=watch,
    )
    for _ in run:
        pass
    numbers, walls, counted, capturing = [], [], [], []
    for before, after in itertools.pairwise(seen):
        if 0 < after[0] == before[0]:
            captured = after[1] > before[1]
            (capturing if captured else walls).append(after[2] - before[2])
            counted += [] if captured else [after[3]]
            numbers += [] if captured else [after[0]]
    return Rounds(numbers, walls, torch.stack(counted).cpu(), capturing)


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
