"""Part (b). Question: what does the whole flow give on a pair that is really trained here and now?

Train target (197 M) and draft (12.6 M) in bf16, then, at temperature 1 (top-k 50) and greedily, collect → sweep of 20
heads → tune → bench, all lossless policies against the target alone, at batch 1, 8, 32 and 128; and transformers'
assisted generation of the same pair at the same policies. Traces, heads and costs are made for this pair; nothing is
recorded.

Models and traces stay in --work: where that is gone, with its machine, everything is made and measured anew.

python benchmarks/gpu/whole_flow.py --text runs/gpu-text [--stages train flow bench assisted] [--minutes 9] [--tiny]
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import assisted
import train_pair
from cells import Cell, Cells, open_cells, part_parser
from graph_modes import best_mode, modes
from prepare_text import tiny_text

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.files import read_json, write_json
from accept_head.inference.bench.figures import TWIN
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.policies.drafting import check_lossless
from accept_head.inference.policies.registry import POLICIES, make_policy
from accept_head.inference.profile.forwards import measure_forwards
from accept_head.inference.verbs.bench import bench
from accept_head.inference.verbs.profile import profile
from accept_head.inference.verbs.tune import tune
from accept_head.pair import load_pair
from accept_head.prompts import load_prompts
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

STAGES = ("train", "flow", "bench", "assisted")
TEMPERATURES = (1.0, 0.0)
DEPTHS, WEIGHTS = [0, 1, 2, 3, 4], [1, 3, 6, 12]
# Prompts of a bench cell by batch size: of 128 rows as many as there are, each about twice.
BENCH_PROMPTS = {1: 8, 8: 32, 128: 240, 32: 96}  # in this order: the largest says more than one in between
MORE_WITH_GRAPHS = 2  # times as many at batch 1, where they take least time and scatter most
# Guesses of what cells take.
BENCH_SECONDS = {1: 80, 8: 33, 32: 33, 128: 33}
FLOW_SECONDS = {"profile": 45, "collect": 25, "sweep": 60, "tune": 45}
AROUND_TRAINING, ASSISTED_SECONDS = 12, 40
TUNE_PROMPTS = 48
NEW_TOKENS, BENCH_TOKENS, ASSISTED_TOKENS = 96, 64, 48
ASSISTED_PROMPTS = 6
# As their authors have them, where tuning changes much; and what tuning at batch 1 says nothing of.
OTHERS = ["hf-heuristic", "hf-confidence", "max-prob-mean:0.6", "bandit"]
TINY_RULES = ["confidence"]


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--text", type=Path, help="folder made by prepare_text.py")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--target_seconds", type=float, default=110)
    parser.add_argument("--draft_seconds", type=float, default=50)
    parser.add_argument("--batches", type=int, nargs="+", help="1 8 32 128 when left out")
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    cells, work = open_cells("whole_flow", options, fallback=modes()[1], compile=best_mode())
    flow = Flow(cells, work, options)
    flow.trained()
    if "flow" in options.stages or "bench" in options.stages:
        flow.tuned()
    if "assisted" in options.stages:
        flow.assisted()
    if "bench" in options.stages:
        flow.benched()
    return cells.status


class Flow:
    """The stages; each begins with what those before it have left in `work`."""

    def __init__(self, cells: Cells, work: Path, options: argparse.Namespace):
        self.cells, self.work, self.tiny, self.options = cells, work, cells.tiny, options
        self.text = tiny_text(work / "text") if self.tiny else options.text
        if self.text is None or not (self.text / "text.npz").is_file():
            raise InputError(f"--text {self.text}: has no text.npz; benchmarks/gpu/prepare_text.py makes it")
        self.target, self.draft = (work / "pair" / name for name in ("target", "draft"))
        self.pair = {"target": str(self.target), "draft": str(self.draft)}
        self.seconds = (2.0, 2.0) if self.tiny else (options.target_seconds, options.draft_seconds)
        self.tokens = 24 if self.tiny else NEW_TOKENS
        self.last: list[Cell] = []  # without which the next stage has nothing to begin with
        self.chosen: dict[float, Cell] = {}  # what tuning said

    # --- train --------------------------------------------------------------------------------------------------------

    def trained(self) -> None:
        first, second = self.seconds
        size = (self.text / "text.npz").stat().st_size
        measure = partial(self.cells.measure, settings={"text": size, "seconds": list(self.seconds)})
        target = measure(
            "train target",
            call=self._train_target,
            needs=first + AROUND_TRAINING,
            made=self.target / "model.safetensors",
        )
        draft = measure(
            "train draft",
            call=lambda: train_pair.train_draft(self.text, self.draft, self.target, seconds=second, tiny=self.tiny),
            needs=second + AROUND_TRAINING,
            made=self.draft / "model.safetensors",
            after=[target],
        )
        self.last = [target, draft]

    def _train_target(self) -> Cell:
        for old in (self.work / "pair", self._costs(), self._map(), *map(self._at, TEMPERATURES)):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)  # they are of another pair
        return train_pair.train_target(self.text, self.target, seconds=self.seconds[0], tiny=self.tiny)

    # --- collect, sweep, profile, tune --------------------------------------------------------------------------------

    def tuned(self) -> None:
        self.last.append(
            self.cells.measure(
                "profile",
                self._settings(),
                self._profile,
                needs=FLOW_SECONDS["profile"],
                made=self._costs(),
                after=self.last,
            )
        )
        for temperature in TEMPERATURES:
            name, settings = f"temperature {temperature:g}", self._settings() | {"temperature": temperature}
            folder = self._at(temperature)
            collected = self.cells.measure(
                f"collect, {name}",
                settings,
                lambda t=temperature: self._collect(t),
                needs=FLOW_SECONDS["collect"],
                made=folder / "dev" / "trace_config.json",
                after=self.last,
            )
            swept = self.cells.measure(
                f"sweep, {name}",
                settings | {"depth": DEPTHS, "w_rej": WEIGHTS},
                lambda t=temperature: self._sweep(t),
                needs=FLOW_SECONDS["sweep"],
                made=folder / "heads" / "depth0-w_rej1",
                after=[collected],
            )
            chosen = self.cells.measure(
                f"tune, {name}",
                settings,
                lambda t=temperature: self._tune(t),
                needs=FLOW_SECONDS["tune"],
                made=folder / "tuned.json",
                after=[swept],
            )
            self.chosen[temperature] = chosen

    def _settings(self) -> dict[str, Any]:
        """Figures are of one pair: of another one, which a fresh machine has trained, they are measured anew."""
        there = (self.draft / "model.safetensors").is_file()
        return {"pair": checkpoint_fingerprint(self.draft)[:12] if there else None, "new_tokens": self.tokens}

    def _at(self, temperature: float) -> Path:
        return self.work / f"t{temperature:g}"

    def _costs(self) -> Path:
        return self.work / "costs.json"

    def _map(self) -> Path:
        return self.work / "map.json"

    def _prompts(self, split: str) -> str:
        return str(self.text / "prompts" / f"{split}.jsonl")

    def _profile(self) -> Cell:
        mode = best_mode()
        sizes, lengths = ([1, 2], [0, 1, 2]) if self.tiny else ([1, 8, 32, 128], [0, 1, 2, 4, 8])
        how = "as decoded"
        try:
            profile(
                **self.pair,
                out=str(self._costs()),
                prompts=self._prompts("dev"),
                max_prompts=4 if self.tiny else 6,
                max_new_tokens=min(self.tokens, 48),
                temperature=1.0,
                batch_map=str(self._map()),
                batch_sizes=sizes,
                draft_lengths=lengths,
                dtype="bfloat16",
                compile=mode,
            )
        except InputError as error:  # rounds that no line fits; without costs there would be no bench either
            how = f"bare forwards, no batch map: {error}"
            pair = load_pair(self.target, self.draft, dtype="bfloat16")
            loaded = load_prompts(self._prompts("dev"), pair.tokenizer, max_prompts=6)
            forward = measure_forwards(pair, [prompt.ids for prompt in loaded], compile=mode)
            write_json(self._costs(), asdict(forward))
        table = read_json(self._map()) if self._map().is_file() else None
        return {"how": how, "costs": read_json(self._costs()), "map": table}

    def _collect(self, temperature: float) -> Cell:
        counts, begin = {}, time.monotonic()
        # A second set of responses to the same prompts; greedily they would be the first again.
        more = [("more", 48, 2)] if temperature else []
        for split, prompts, seed in [("train", 48, 0), *more, ("dev", 16, 1)]:
            collect(
                **self.pair,
                out=str(self._at(temperature) / split),
                prompts=self._prompts("train" if split == "more" else split),
                temperature=temperature,
                top_k=50,
                max_new_tokens=self.tokens,
                max_prompts=prompts if self.tiny else None,
                batch_size=16 if self.tiny else 200,
                shard_size=16 if self.tiny else 200,
                seed=seed,
                dtype="bfloat16",
            )
            counts[split] = _tokens(self._at(temperature) / split)
        spent = time.monotonic() - begin
        return {"tokens": counts, "tokens_per_second": sum(counts.values()) / spent, "seconds": spent}

    def _sweep(self, temperature: float) -> Cell:
        folder, begin = self._at(temperature), time.monotonic()
        train(
            traces=[str(path) for path in (folder / "train", folder / "more") if path.is_dir()],
            dev_traces=str(folder / "dev"),
            draft=str(self.draft),
            out=str(folder / "heads"),
            depth=DEPTHS[:2] if self.tiny else DEPTHS,
            w_rej=WEIGHTS[:1] if self.tiny else WEIGHTS,
            epochs=1 if self.tiny else None,  # the recipe's, and its small steps
            batch_size=8 if self.tiny else None,
            micro_batch_size=32,
            precision="fp32" if self.tiny else "bf16",
        )
        heads = sorted(path for path in (folder / "heads").iterdir() if path.is_dir())
        quality = {head.name: read_json(head / "metrics.json") for head in heads}
        return {"heads": len(heads), "seconds": time.monotonic() - begin, "metrics": quality}

    def _tune(self, temperature: float) -> Cell:
        folder = self._at(temperature)
        heads = sorted(str(path) for path in (folder / "heads").iterdir() if path.is_dir())
        tune(
            traces=str(folder / "dev"),
            draft=str(self.draft),
            out=str(folder / "tuned.json"),
            head=heads,
            costs=str(self._costs()),
            rules=TINY_RULES if self.tiny else None,
            max_prompts=8 if self.tiny else TUNE_PROMPTS,
            dtype="bfloat16",
        )
        rows = read_json(folder / "tuned.json")["policies"]
        ours = [row for row in rows if row["name"].startswith("head:")]
        best = max(ours, key=lambda row: row["throughput"])
        return {
            "head": next(head for head in heads if f"head:{head}" == best["name"].rpartition(":")[0]),
            "head_gain_over_best_fixed_replayed": best["gain_over_best_fixed"],
            "oracle_gap_closed": best["oracle_gap_closed"],
            "tuned": [_row(row) for row in rows if not row["name"].startswith("fixed") and row not in ours],
            "heads": [_row(row) for row in ours],
        }

    # --- bench --------------------------------------------------------------------------------------------------------

    def benched(self) -> None:
        for batch in self.options.batches or ([1, 2] if self.tiny else BENCH_PROMPTS):
            for temperature in TEMPERATURES:
                self.cells.measure(
                    f"bench, batch {batch}, temperature {temperature:g}",
                    self._settings() | {"batch": batch, "temperature": temperature},
                    lambda b=batch, t=temperature: self._bench(b, t),
                    needs=BENCH_SECONDS.get(batch, 40),
                    after=[*self.last, self.chosen[temperature]],
                )

    def _specs(self, temperature: float) -> tuple[list[str], dict[str, str]]:
        """Every lossless policy of the command line, tuned where it can be; and why any is left out."""
        rows = read_json(self._at(temperature) / "tuned.json")["policies"]
        kinds = {row["name"].partition(":")[0] for row in rows}
        tuned = [
            row["spec"] for row in rows if row["name"].partition(":")[0] in kinds - {"none", "fixed", "oracle", "head"}
        ]
        head, costs = self.chosen[temperature]["head"], self._costs()
        own = [f"head:{head}", f"head:{head},costs={costs}"]
        own += [f"batch-map:{self._map()}"] if self._map().is_file() else []
        specs = [*own, *tuned, *OTHERS]
        for name, entry in POLICIES.items():  # what tuning was not asked about
            if name not in ("none", "fixed", "head") and not any(spec.partition(":")[0] == name for spec in specs):
                argument = str(costs) if "COSTS" in entry.form else ""
                specs.append(f"{name}:{argument}" if argument else name)  # batch-map is then left out, and says so
        pair, kept, left = load_pair(self.target, self.draft, device="cpu"), [], {}
        for spec in dict.fromkeys(specs):
            try:
                check_lossless(make_policy(spec, pair), "ratio", greedy=temperature == 0)
                kept.append(spec)
            except InputError as error:
                left[spec] = str(error)
        return kept, left

    def _bench(self, batch: int, temperature: float) -> Cell:
        specs, left = self._specs(temperature)
        out = self.work / f"bench-{batch}-{temperature:g}.json"
        mode = best_mode()
        count = BENCH_PROMPTS.get(batch, 2 * batch) * (MORE_WITH_GRAPHS if batch == 1 and mode == "graphs" else 1)
        bench(
            **self.pair,
            out=str(out),
            prompts=self._prompts("test"),
            policy=specs,
            fixed=[1, 2] if self.tiny else None,
            batch_size=[batch],
            temperature=[temperature],
            max_prompts=max(4, batch) if self.tiny else count,
            max_new_tokens=8 if self.tiny else BENCH_TOKENS,
            repeats=1,
            costs=str(self._costs()),
            dtype="bfloat16",
            compile=mode,
        )
        cell = read_json(out)["cells"][0]
        policies = [{k: v for k, v in row.items() if k not in ("chunks", "domains")} for row in cell["policies"]]
        captured = self._captured([row["name"] for row in policies]) if mode == "graphs" else {}
        for row in policies:
            row["captured"] = captured.get(row["name"], False)
        return {
            "head": f"head:{self.chosen[temperature]['head']}",
            "recommended": f"head:{self.chosen[temperature]['head']},costs={self._costs()}",
            "best_fixed": cell["best_fixed"],
            "noise": cell["noise"],
            "left_out": left,
            "policies": policies,
        }

    def _captured(self, names: list[str]) -> dict[str, bool]:
        """Whether a policy's own steps are functions of tensors alone, and so graphs where forwards are."""
        pair = load_pair(self.target, self.draft, dtype="bfloat16")
        return {name: capture_of(make_policy(name.removesuffix(TWIN), pair)) is not None for name in names}

    # --- against transformers -----------------------------------------------------------------------------------------

    def assisted(self) -> None:
        for temperature in reversed(TEMPERATURES):
            self.cells.measure(
                f"assisted, temperature {temperature:g}",
                self._settings() | {"temperature": temperature},
                lambda t=temperature: assisted.side_by_side(
                    load_pair(self.target, self.draft, dtype="bfloat16"),
                    self._prompts("test"),
                    temperature=t,
                    new_tokens=8 if self.tiny else ASSISTED_TOKENS,
                    prompts=2 if self.tiny else ASSISTED_PROMPTS,
                    mode=best_mode(),
                ),
                needs=ASSISTED_SECONDS,
                after=self.last[:2],
            )


def _tokens(traces: Path) -> int:
    import pyarrow.parquet as pq

    shards = sorted(traces.glob("*.parquet"))
    return sum(len(row) for shard in shards for row in pq.read_table(shard)["response_ids"].to_pylist())


def _row(row: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "spec", "params", "throughput", "speedup", "gain_over_best_fixed", "oracle_gap_closed")
    return {name: row[name] for name in names if name in row}


if __name__ == "__main__":
    raise SystemExit(main())
