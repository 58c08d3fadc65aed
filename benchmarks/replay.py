"""Questions: does replay say what decoding does, and how much sooner?

Decodes test prompts of the embedded pair with five trained heads at nine thresholds and with the policies that need no
training, at T = 1 and T = 0, batch 16, and replays the same on traces of the same prompts. Agreement: each rate's
difference in joint standard errors (over prompts; T = 1), and in per cent (T = 0, same responses). Speed: seconds to
decode the 45 head settings over seconds to price them, after the rollouts, everything from reading the tables on.

python benchmarks/table3.py --recipe default    # trains the heads
python benchmarks/replay.py                     # about 40 minutes on one core
"""

from __future__ import annotations

import time
from typing import Any

import embedded
import numpy as np
from record import REPOSITORY, TINY, write_result
from tqdm import tqdm

from accept_head import Pair, load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.inference import generate
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.bootstrap import draws
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed, replay_fixed
from accept_head.inference.tune.heads import load_heads

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))
HEADS = tuple(f"depth{depth}-w_rej1" for depth in range(5))
FIXED = (1, 2, 4, 8)
BATCH, PRICINGS = 16, 5


def main() -> None:
    quiet_libraries()
    pair, fingerprint = load_pair(TINY / "target", TINY / "draft"), checkpoint_fingerprint(TINY / "draft")
    folder = REPOSITORY / "runs" / "table3_default"
    heads = load_heads([str(folder / name) for name in HEADS], pair.draft)
    results: dict[str, Any] = {}
    for temperature in (1.0, 0.0):
        place = embedded.traces("test", temperature)
        begin = time.perf_counter()
        load_coupled(place, pair.draft, fingerprint)
        rollout_seconds = time.perf_counter() - begin
        settings, times = [Setting(threshold=h) for h in THRESHOLDS], []
        for _ in range(PRICINGS):
            begin = time.perf_counter()
            traces = load_coupled(place, pair.draft, fingerprint)
            priced = {
                name: replay_thresholds(traces, HeadPolicy(head, 0.5), settings, name) for name, head in heads.items()
            }
            times.append(time.perf_counter() - begin)
        seconds = float(np.median(times))
        jobs: list[tuple[Replayed, Any]] = [
            (replayed, HeadPolicy(heads[name], replayed.params["threshold"]))
            for name, rows in priced.items()
            for replayed in rows
        ]
        timed = len(jobs) if temperature else 9  # greedy: the rates are exact, one head is enough
        jobs = jobs[:timed] + others(traces)
        rows = []
        decode_seconds = 0.0
        for number, (replayed, policy) in enumerate(tqdm(jobs, desc=f"T = {temperature:g}")):
            begin = time.perf_counter()
            counts, same = decode(pair, policy, traces)
            decode_seconds += (time.perf_counter() - begin) * (number < timed)
            rows.append({"policy": replayed.name, **agreement(replayed, counts), "same_responses": same})
        results[f"temperature_{temperature:g}"] = {
            "prompts": len(traces.lengths),
            "tokens": traces.positions,
            "rollouts": len(traces.rejected),
            "rollout_seconds_or_0_if_they_were_there": rollout_seconds,
            "pricing_seconds": seconds,
            "pricing_seconds_of_each_repeat": times,
            "priced_settings": len(HEADS) * len(THRESHOLDS),
            "decoded_head_settings": timed,
            "decoding_seconds": decode_seconds,
            "decoding_over_pricing": decode_seconds / timed * len(HEADS) * len(THRESHOLDS) / seconds,
            "largest_z": max(abs(row[f"{rate}_z"]) for row in rows for rate in ("discard_rate", "verification_rate")),
            "largest_relative_difference": max(row["largest_relative_difference"] for row in rows),
            "inside_the_joint_95_interval": float(
                np.mean(
                    [abs(row[f"{rate}_z"]) < 1.96 for row in rows for rate in ("discard_rate", "verification_rate")]
                )
            ),
            "rows": rows,
        }
        print({key: value for key, value in results[f"temperature_{temperature:g}"].items() if key != "rows"})
    print(f"wrote {write_result('replay', results)}")


def others(traces: CoupledTraces) -> list[tuple[Replayed, Any]]:
    jobs: list[tuple[Replayed, Any]] = [
        (replayed, FixedPolicy(k)) for k, replayed in zip(FIXED, replay_fixed(traces, FIXED), strict=True)
    ]
    for rule, name, values in (
        (ConfidencePolicy, "confidence", (0.2, 0.4, 0.6)),
        (EntropyPolicy, "entropy", (1.0, 2.0)),
    ):
        replayed = replay_thresholds(traces, rule(), [Setting(threshold=value) for value in values], name)
        jobs += [(row, rule(value)) for row, value in zip(replayed, values, strict=True)]
    return jobs


def decode(pair: Pair, policy: Any, traces: CoupledTraces) -> tuple[np.ndarray, int]:
    """(n, 4) counts as a replay has them, and how many responses are those of the traces."""
    tokens, stats = generate(
        pair.target,
        pair.draft,
        traces.traces["prompt_ids"][:],
        policy=policy,
        sampling=traces.config.sampling,
        max_new_tokens=traces.config.max_new_tokens,
        batch_size=BATCH,
        end_token_ids=traces.config.end_token_ids,
        seed=1,
    )
    counts = np.array([[row.generated, row.discarded, row.rounds, row.draft_forwards] for row in stats], dtype=float)
    same = sum(mine == list(theirs) for mine, theirs in zip(tokens, traces.traces["response_ids"][:], strict=True))
    return counts, same


def agreement(replayed: Replayed, decoded: np.ndarray) -> dict[str, float]:
    drawn = draws(len(decoded))
    row: dict[str, float] = {"largest_relative_difference": 0.0}
    for column, rate in ((1, "discard_rate"), (2, "verification_rate")):
        values, errors = [], []
        for counts in (replayed.counts, decoded):
            resampled = drawn @ counts
            errors.append(float((resampled[:, column] / resampled[:, 0]).std()))
            values.append(float(counts[:, column].sum() / counts[:, 0].sum()))
        row[f"{rate}_replayed"], row[f"{rate}_decoded"] = values
        row[f"{rate}_z"] = (values[0] - values[1]) / float(np.hypot(*errors))
        row["largest_relative_difference"] = max(row["largest_relative_difference"], abs(values[0] / values[1] - 1))
    return row


if __name__ == "__main__":
    main()
