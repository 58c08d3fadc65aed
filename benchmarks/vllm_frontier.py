"""Question: what does a head save at exactly as many target calls as a fixed K, one greedy request at a time?

By replay, which greedily is what a loop counts, of the 184 prompts on which nothing was chosen
(checkpoints/tiny/prompts/final.jsonl): drafted tokens per accepted one, and target calls, at every threshold, next to
K = 3. vllm_final.json has one threshold of it, that of the dev prompts, decoded by the engine.

OMP_NUM_THREADS=1 python benchmarks/vllm_frontier.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ladder import coupled, loaded
from record import TINY, write_result

from accept_head.command.libraries import quiet_libraries
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed, replay_fixed

K, K_MAX = 3, 8
THRESHOLDS = [round(0.50 + 0.01 * step, 2) for step in range(31)]


def main() -> None:
    quiet_libraries()
    traces = coupled("final", 0.0)
    (fixed,) = replay_fixed(traces, [K])
    policy = HeadPolicy(loaded(TINY / "heads" / "greedy_both", 0.0), 0.5)
    settings = [Setting(threshold=threshold, k_max=K_MAX) for threshold in THRESHOLDS]
    replayed = replay_thresholds(traces, policy, settings, "head")
    rows = [{"threshold": h, **against(one, fixed)} for h, one in zip(THRESHOLDS, replayed, strict=True)]
    equal = min((row for row in rows if row["target_calls"][0] <= 0), key=lambda row: row["threshold"])
    result = {"prompts": len(fixed.counts), "against": f"fixed:{K}", "at_no_more_calls": equal, "thresholds": rows}
    print(equal)
    print(f"wrote {write_result('vllm_frontier', result)}")


def against(one: Replayed, fixed: Replayed) -> dict[str, Any]:
    """Change of drafted tokens per accepted one and of target calls a token, with 95 % bounds over prompts."""
    ones = np.ones((1, len(one.counts)))
    values, resampled = (
        [figures(weights @ each.counts) for each in (one, fixed)] for weights in (ones, draws(len(one.counts)))
    )
    changes = {}
    for place, name in enumerate(("drafted_per_accepted", "target_calls")):
        value, drawn = (pair[0][place] / pair[1][place] - 1 for pair in (values, resampled))
        changes[name] = [round(number, 4) for number in (float(value[0]), *interval(drawn))]
    return changes


def figures(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of (n, 4) generated, discarded, target and draft forwards, where each drafted token is one of the draft."""
    generated, discarded, calls, drafted = sums.T
    return drafted / (drafted - discarded), calls / generated


if __name__ == "__main__":
    main()
