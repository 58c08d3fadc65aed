"""Question: how much of what retraining a head would regain after a shift does online recalibration regain by itself?

Heads of one recipe on the embedded pair, and shifts between what a head was trained on and what is served:
domain       trained on maths, serves stories and prose: the stream that `train=true` was made on
to_maths     trained on stories and prose, serves maths; to_code: serves code
temperature  trained at T = 1, serves T = 0.6
greedy       trained at T = 1, serves greedily
target       trained with the target, serves with one that was fine-tuned on code (the draft stays)
Test prompts are served one after the other, by replay (eq. 3.1, c = 0.126), in one stream. The recalibration knows
nothing when it begins. Thresholds are tuned on dev prompts: of the head's own distribution for (a) and (b), of the new
one for (c). share_regained = (b − a) / (c − a), 95 % by bootstrap over prompts.

shifted (a)           the head as it is
online (b)            `online=true` with the old threshold
online_trained (b)    `train=true` as well: the head itself learns on, of the drafted tokens and of the alternatives to
                      them that verification can judge
alone_trained (b)     the same, of the drafted tokens only
online_by_costs (b)   no threshold: rounds end by costs
retrained (c)         a head of the same recipe, trained on the new distribution
To compare: online_without_state, the head's last layer stays as it is. slope_and_intercepts, nothing else is learnt.
fitted_offline, these are fitted on dev prompts of the new distribution, which is the most that they can do. retuned, no
correction, but the threshold that is best on these. second_half: the share regained in the second half of the stream.
`after`: the stream begins with the text that the retrained head learnt from, served once and in its order; the test
prompts come after it, and only they are judged.

The first run makes the fine-tuned target (8 minutes on one core), traces (25) and heads (7) under runs/shift, and
resumes there. It needs `--data`, the folder that `make pair` reads. The replays take 6 minutes.

python benchmarks/shift.py --data DATA
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from record import REPOSITORY, RESULTS, TINY, write_result
from scipy.special import expit, logit
from trace_alternatives import alternatives_of

from accept_head.alternatives import Alternatives
from accept_head.calibration import FEWEST, DepthCalibration, Rounds
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.files import atomic_path, read_json
from accept_head.head.saved import load_head
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.recalibration import OnlineRecalibration
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import Signal
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.calibration import rounds_of
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.pair import hidden_size, input_embeddings, load_model
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

WORK = Path("runs/shift")
PAIR = TINY.relative_to(REPOSITORY)
COSTS, K_MAX, NEW_TOKENS = ForwardCosts(t_draft=0.0013, t_target=0.0103), 8, 96
READS = {"depth": 2, "embedding": True, "signals": True, "predicts": "token"}
RECIPE = {**READS, "packing": "prefix", "alternatives": 0, "epochs": 6}
ALL = ("code", "instruction", "math", "prose", "stories")


class Served(NamedTuple):
    """A distribution. seeds: of train; each is one response a prompt. test_seeds: the same of test."""

    domains: tuple[str, ...] = ALL
    temperature: float = 1.0
    target: Path = PAIR / "target"
    seeds: tuple[int, ...] = (0,)
    test_seeds: tuple[int, ...] = (0,)


SERVED = {
    "t1": Served(),
    "t0.6": Served(temperature=0.6),
    "greedy": Served(temperature=0.0),
    "maths": Served(("math",), seeds=(0, 1), test_seeds=(0, 1, 2, 3)),
    "code": Served(("code",), seeds=(0, 1), test_seeds=(0, 1, 2, 3)),
    "stories_prose": Served(("prose", "stories"), test_seeds=(0, 1, 2, 3)),
    "tuned": Served(target=WORK / "target"),
}
SHIFTS = {
    "none": ("t1", "t1"),
    "domain": ("maths", "stories_prose"),
    "to_maths": ("stories_prose", "maths"),
    "to_code": ("stories_prose", "code"),
    "temperature": ("t1", "t0.6"),
    "greedy": ("t1", "greedy"),
    "target": ("t1", "tuned"),
}


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--data", type=Path, help="texts to fine-tune the target on, if that is not done yet")
    parser.add_argument("--prepare", nargs="*", help="only make the traces and heads of these distributions")
    parser.add_argument(
        "--shifts", nargs="*", default=list(SHIFTS), choices=SHIFTS, help="all, when left out; others stay as they are"
    )
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    quiet_libraries()
    needed = sorted({each for name in options.shifts for each in SHIFTS[name]})
    for name in needed if options.prepare is None else options.prepare:
        prepare(name, options.data)
    if options.prepare is not None:
        return
    bench = Bench()
    before = RESULTS / "shift.json"
    rows = read_json(before)["shifts"] if before.is_file() else {}
    for name in options.shifts:
        rows[name] = bench.shift(*SHIFTS[name])
        print(json.dumps({name: rows[name]}), flush=True)
    result = {"costs": asdict(COSTS), "head": RECIPE, "shifts": {name: rows[name] for name in SHIFTS if name in rows}}
    print(f"wrote {write_result('shift', result, 'python benchmarks/shift.py --data DATA')}")


# --- targets, traces, heads ------------------------------------------------------------------------------------------


def prepare(name: str, data: Path | None) -> None:
    served = SERVED[name]
    if served.target == WORK / "target":
        fine_tune(data)
    for split, seeds in (("train", served.seeds), ("dev", (0,)), ("test", served.test_seeds)):
        for seed in seeds:
            collect(
                target=str(served.target),
                draft=str(PAIR / "draft"),
                prompts=str(prompts(split, served.domains)),
                out=str(traces(name, split, seed)),
                temperature=served.temperature,
                top_k=0,
                max_new_tokens=NEW_TOKENS,
                batch_size=40,
                shard_size=80,
                seed=seed,
            )
    if not (head(name) / "model.safetensors").is_file():
        train(
            traces=[str(traces(name, "train", seed)) for seed in served.seeds],
            dev_traces=str(traces(name, "dev")),
            draft=str(PAIR / "draft"),
            out=str(head(name)),
            batch_size=4,
            micro_batch_size=4,
            **RECIPE,
        )


def traces(name: str, split: str, seed: int = 0) -> Path:
    return WORK / name / f"{split}_{seed}"


def head(name: str) -> Path:
    return WORK / name / "head"


def prompts(split: str, domains: tuple[str, ...]) -> Path:
    """The shipped prompts of some domains."""
    whole = PAIR / "prompts" / f"{split}.jsonl"
    if domains == ALL:
        return whole
    path = WORK / "prompts" / f"{split}-{'-'.join(domains)}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in whole.read_text().splitlines() if json.loads(line)["domain"] in domains]
        with atomic_path(path) as temporary:
            temporary.write_text("\n".join(lines) + "\n")
    return path


def fine_tune(data: Path | None, tokens: int = 300_000, lr: float = 4e-3) -> None:
    """The target, trained on for so many tokens of code."""
    if (WORK / "target" / "model.safetensors").is_file():
        return
    if data is None:
        raise SystemExit("the target is not fine-tuned yet: --data FOLDER is needed")
    sys.path.insert(0, str(REPOSITORY / "checkpoints" / "recipe"))
    from corpus import load_corpus
    from language_model import train_language_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    corpus = load_corpus(data)
    train_ids, held_out = (
        np.array([i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]])
        for texts in (
            [document.text for document in part if document.domain == "code"]
            for part in (corpus.train, corpus.held_out)
        )
    )
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32", attn_implementation="eager")
    print(f"fine-tuning on {min(tokens, len(train_ids))} tokens of code", flush=True)
    tuned = train_language_model(model, train_ids[:tokens], held_out[: 4 * 8192], work=WORK / "target-run", lr=lr)
    with atomic_path(WORK / "target") as temporary:
        tuned.half().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


# --- the comparison --------------------------------------------------------------------------------------------------


class Alone(RecalibratedHeadPolicy):
    """As in a host that tells no alternatives."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.needs -= {Signal.ALTERNATIVES}


class Bench:
    def __init__(self) -> None:
        self.draft = load_model(str(PAIR / "draft"), "--draft")
        self.fingerprint = checkpoint_fingerprint(str(PAIR / "draft"))
        self.loaded: dict[Path, CoupledTraces] = {}
        self.others: dict[Path, Alternatives] = {}

    def traces(self, name: str, split: str, seed: int = 0) -> CoupledTraces:
        path = traces(name, split, seed)
        if path not in self.loaded:
            self.loaded[path] = load_coupled(path, self.draft, self.fingerprint, k_max=K_MAX)
        return self.loaded[path]

    def alternatives(self, name: str, split: str, seed: int) -> Alternatives | None:
        """What verification also says of each position; greedily nothing."""
        served, path = SERVED[name], traces(name, split, seed)
        if served.temperature and path not in self.others:
            target = load_model(str(served.target), "--target")
            self.others[path] = alternatives_of(self.traces(name, split, seed), target, self.draft)
        return self.others.get(path)

    def head(self, name: str) -> Any:
        return load_head(head(name), hidden_size=hidden_size(self.draft), embeddings=input_embeddings(self.draft))

    def tuned(self, name: str, served: str) -> float:
        """The best threshold of a head on dev prompts."""
        settings = [Setting(threshold=threshold, k_max=K_MAX) for threshold in ThresholdPolicy.grid]
        rows = replay_thresholds(self.traces(served, "dev"), HeadPolicy(self.head(name), 0.5), settings, name)
        return float(max(rows, key=lambda row: speed(row.counts)).params["threshold"])

    def shift(self, before: str, now: str) -> dict[str, Any]:
        thresholds = {
            "shifted": self.tuned(before, before),
            "retuned": self.tuned(before, now),
            "retrained": self.tuned(now, now),
        }
        arms = self.arms(before, now, thresholds)
        counts = {name: self.stream(now, policy) for name, policy in arms.items()}
        fixed = {k: self.fixed(now, k) for k in range(1, K_MAX + 1)}
        best = max(fixed, key=lambda k: speed(fixed[k]))
        counts |= {"best_fixed": fixed[best], "oracle": self.oracle(now)}
        compared = [name for name in arms if name not in ("shifted", "retrained")]
        shares = {name: share(counts["shifted"], counts[name], counts["retrained"]) for name in compared}
        half = len(counts["shifted"]) // 2
        later = {name: share(*[counts[each][half:] for each in ("shifted", name, "retrained")]) for name in compared}
        return {
            "trained_on": before,
            "served": now,
            "thresholds": thresholds,
            "best_fixed_k": best,
            "responses": len(counts["shifted"]),
            "tokens_per_second": {name: round(speed(rows), 2) for name, rows in counts.items()},
            "over_best_fixed": {name: gain(rows, counts["best_fixed"]) for name, rows in counts.items()},
            "share_regained": shares,
            "second_half": later,
            "after": self.after(before, now, thresholds["shifted"], counts),
            "learnt": learnt(arms["online"].recalibration),
        }

    def arms(self, before: str, now: str, thresholds: dict[str, float]) -> dict[str, Any]:
        """Policies by name."""
        shifted, old = self.head(before), thresholds["shifted"]
        fitted = fit_affine(rounds_of(self.traces(now, "dev"), HeadPolicy(shifted, 0.5)))

        def corrected(threshold: float, **options: Any) -> RecalibratedHeadPolicy:
            return RecalibratedHeadPolicy(shifted, threshold, k_max=K_MAX, **options)

        def by_costs(policy: HeadPolicy) -> BatchStopPolicy:
            return BatchStopPolicy(policy, PairCosts.constant(COSTS))

        return {
            "shifted": HeadPolicy(shifted, old, k_max=K_MAX),
            "online": corrected(old, online=True),
            "online_trained": corrected(old, online=True, train=True),
            "alone_trained": Alone(shifted, old, k_max=K_MAX, online=True, train=True),
            "online_by_costs": by_costs(corrected(1.0, online=True)),
            "retrained": HeadPolicy(self.head(now), thresholds["retrained"], k_max=K_MAX),
            "online_without_state": corrected(old, online=True, state=False),
            "slope_and_intercepts": corrected(old, online=True, signals=False, state=False),
            "fitted_offline": corrected(old, calibration=fitted),
            "retuned": HeadPolicy(shifted, thresholds["retuned"], k_max=K_MAX),
            "by_costs": by_costs(HeadPolicy(shifted, 1.0, k_max=K_MAX)),
        }

    def after(self, before: str, now: str, threshold: float, counts: dict[str, np.ndarray]) -> dict[str, Any]:
        """What is learnt online of the retrained head's own text, once through."""
        rows: dict[str, Any] = {"responses": sum(len(self.traces(now, "train", s).lengths) for s in SERVED[now].seeds)}
        for name, learns in {"online": False, "online_trained": True}.items():
            policy = RecalibratedHeadPolicy(self.head(before), threshold, k_max=K_MAX, online=True, train=learns)
            self.stream(now, policy, "train")
            served = self.stream(now, policy)
            rows[name] = {
                "tokens_per_second": round(speed(served), 2),
                "over_best_fixed": gain(served, counts["best_fixed"]),
                "share_regained": share(counts["shifted"], served, counts["retrained"]),
            }
        return rows

    def stream(self, name: str, policy: Any, split: str = "test") -> np.ndarray:
        """Counts of all responses of a split, one after the other, (n, 4)."""
        parts = []
        for seed in SERVED[name].test_seeds if split == "test" else SERVED[name].seeds:
            learns = isinstance(policy, BatchStopPolicy) or getattr(policy, "recalibration", None) is not None
            others = self.alternatives(name, split, seed) if Signal.ALTERNATIVES in policy.needs else None
            batch = 1 if learns else None
            parts.append(replay(self.traces(name, split, seed), policy, name, batch=batch, alternatives=others).counts)
        return np.concatenate(parts)

    def fixed(self, name: str, k: int) -> np.ndarray:
        return self.joined(name, lambda part: replay_fixed(part, [k])[0])

    def oracle(self, name: str) -> np.ndarray:
        return self.joined(name, replay_oracle)

    def joined(self, name: str, each: Any) -> np.ndarray:
        replayed: list[Replayed] = [each(self.traces(name, "test", seed)) for seed in SERVED[name].test_seeds]
        return np.concatenate([part.counts for part in replayed])


def fit_affine(rounds: Rounds, prior: float = 4.0) -> DepthCalibration:
    """One slope, and one intercept a depth, by IRLS with a ridge of `prior` towards slope 1 and intercepts 0.

    Online recalibration on these rounds would approach this.
    """
    depths = int(np.cumprod(rounds.at_risk.sum(0) >= FEWEST).sum())
    where, depth = np.nonzero(rounds.at_risk[:, :depths])
    z, label = logit(rounds.predicted.clip(1e-7, 1 - 1e-7))[where, depth], rounds.acceptance[where, depth]
    x = np.concatenate([z[:, None], np.eye(depths)[depth]], axis=1)
    change = np.zeros(1 + depths)
    for _ in range(50):
        p = expit(z + x @ change)
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + prior * np.eye(1 + depths)
        step = np.linalg.solve(hessian, x.T @ (label - p) - prior * change)
        change += np.clip(step, -0.5, 0.5)
    slope, *intercepts = map(float, change)
    return DepthCalibration(method="affine", slopes=(max(1 + slope, 1e-3),) * depths, intercepts=tuple(intercepts))


def learnt(online: OnlineRecalibration) -> dict[str, Any]:
    """At the end of the stream."""
    log_slope, *rest = online.pooled.tolist()
    signals, state = online.signals - 1, online.state
    return {
        "log_slope": round(log_slope, 3),
        "signals": [round(value, 3) for value in rest[:signals]],
        "last_layer_length": round(float(np.linalg.norm(rest[signals : signals + state])), 3),
        "intercepts": [round(value, 3) for value in rest[signals + state :]],
    }


def speed(counts: np.ndarray) -> float:
    return float(throughputs(counts.sum(0), COSTS))


def gain(counts: np.ndarray, fixed: np.ndarray) -> list[float | None]:
    """Over the best fixed K, with 95 % bounds."""
    return bounded(
        lambda drawn: throughputs(drawn @ counts, COSTS) / throughputs(drawn @ fixed, COSTS) - 1, len(counts)
    )


def share(shifted: np.ndarray, corrected: np.ndarray, retrained: np.ndarray) -> list[float | None]:
    """(b − a) / (c − a), with 95 % bounds."""

    def of(drawn: np.ndarray) -> np.ndarray:
        a, b, c = (throughputs(drawn @ counts, COSTS) for counts in (shifted, corrected, retrained))
        return (b - a) / (c - a)

    return bounded(of, len(shifted))


def bounded(statistic: Any, count: int) -> list[float | None]:
    """Of a statistic of how often each response is drawn, with 95 % bounds; None where it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = statistic(draws(count))
        known = resampled[~np.isnan(resampled)]
        values = [float(statistic(np.ones(count))), *(interval(known) if len(known) else (np.nan, np.nan))]
    return [round(value, 4) if np.isfinite(value) else None for value in values]


if __name__ == "__main__":
    main()
