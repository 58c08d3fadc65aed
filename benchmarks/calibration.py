"""Question: how far off are a head's survival probabilities at each depth, and does it pay to calibrate them?

The shipped heads of the embedded pair, at T = 1 and greedily. The calibration is fitted on every other dev prompt, its
threshold is tuned on the rest of them, and both are judged on the test prompts: binary KL and expected calibration
error of Π P̂ at each depth, over rounds of up to 7 tokens; tokens/s by replay (eq. 3.1, c = 0.126).

python benchmarks/calibration.py
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import REPOSITORY, TINY, write_result

from accept_head.calibration import DepthCalibration, Rounds, fit_temperatures
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.head.network import AcceptanceHead
from accept_head.head.saved import load_head
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.calibration import calibrated, rounds_of, survival_quality
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.walk import replay_fixed, round_starts
from accept_head.pair import hidden_size, input_embeddings, load_model
from accept_head.training.collect.verb import collect

PAIR = TINY.relative_to(REPOSITORY)
COSTS, K_MAX = ForwardCosts(t_draft=0.0013, t_target=0.0103), 8
TRACES = {"sampled": ("runs/shift/t1", 1.0), "greedy": ("runs/shift/greedy", 0.0)}


def main() -> None:
    os.chdir(REPOSITORY)
    quiet_libraries()
    draft, fingerprint = load_model(str(PAIR / "draft"), "--draft"), checkpoint_fingerprint(str(PAIR / "draft"))
    result: dict[str, Any] = {"costs": asdict(COSTS)}
    for name, (folder, temperature) in TRACES.items():
        head = load_head(TINY / "heads" / name, hidden_size=hidden_size(draft), embeddings=input_embeddings(draft))
        dev, test = (
            load_coupled(collected(Path(folder), split, temperature), draft, fingerprint, k_max=K_MAX)
            for split in ("dev", "test")
        )
        result[name] = judged(head, dev, test)
        print({arm: values["tokens_per_second"] for arm, values in result[name].items() if arm != "best_fixed_k"})
    print(f"wrote {write_result('calibration', result)}")


def collected(folder: Path, split: str, temperature: float) -> Path:
    """As benchmarks/shift.py has them."""
    out = folder / f"{split}_0"
    collect(
        target=str(PAIR / "target"),
        draft=str(PAIR / "draft"),
        prompts=str(PAIR / "prompts" / f"{split}.jsonl"),
        out=str(out),
        temperature=temperature,
        top_k=0,
        max_new_tokens=96,
        batch_size=40,
        shard_size=80,
    )
    return out


def judged(head: AcceptanceHead, dev: CoupledTraces, test: CoupledTraces) -> dict[str, Any]:
    responses = np.arange(len(dev.lengths))
    starts = round_starts(dev, dev.drafts)
    of_response = torch.searchsorted(dev.starts, starts, right=True) - 1
    rounds, unseen = rounds_of(dev, HeadPolicy(head, 0.5)), rounds_of(test, HeadPolicy(head, 0.5))
    half = Rounds(**{name: values[(of_response % 2 == 0).numpy()] for name, values in vars(rounds).items()})
    fitted: dict[str, DepthCalibration | None] = {"none": None, "temperature": fit_temperatures(half)}
    counts, result = {}, dict[str, Any]()
    for name, calibration in fitted.items():
        policies = {h: policy_of(head, h, calibration) for h in ThresholdPolicy.grid}
        tried = {h: replay(dev, policy, name).counts[responses % 2 == 1] for h, policy in policies.items()}
        threshold = max(tried, key=lambda h: speed(tried[h]))
        counts[name] = replay(test, policies[threshold], name).counts
        after = unseen if calibration is None else calibrated(unseen, calibration)
        result[name] = {
            "threshold": threshold,
            "tokens_per_second": round(speed(counts[name]), 2),
            "gain_over_none": gain(counts[name], counts["none"]),
            "survival": [
                {
                    key: round(row[key], 5)
                    for key in ("depth", "count", "binary_kl", "ece", "mean_predicted", "mean_observed")
                }
                for row in survival_quality(after)
            ],
            "maps": {} if calibration is None else {key: value for key, value in asdict(calibration).items() if value},
        }
    fixed = {k: replay_fixed(test, [k])[0].counts for k in range(1, K_MAX + 1)}
    best = max(fixed, key=lambda k: speed(fixed[k]))
    return result | {"best_fixed": {"k": best, "tokens_per_second": round(speed(fixed[best]), 2)}}


def policy_of(head: AcceptanceHead, threshold: float, calibration: DepthCalibration | None) -> HeadPolicy:
    if calibration is None:
        return HeadPolicy(head, threshold, k_max=K_MAX)
    return RecalibratedHeadPolicy(head, threshold, k_max=K_MAX, calibration=calibration)


def speed(counts: np.ndarray) -> float:
    return float(throughputs(counts.sum(0), COSTS))


def gain(counts: np.ndarray, none: np.ndarray) -> list[float]:
    """Over the same head without calibration; 95 % bounds by bootstrap over prompts."""
    drawn = draws(len(counts))
    bounds = interval(throughputs(drawn @ counts, COSTS) / throughputs(drawn @ none, COSTS) - 1)
    return [round(value, 4) for value in (speed(counts) / speed(none) - 1, *bounds)]


if __name__ == "__main__":
    main()
