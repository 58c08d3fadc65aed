"""Question: how well does each signal foretell a token's acceptance? DSDE's table II, on a pair of your own.

Pearson's r with the acceptance probability a(Y_i), over all positions of the traces, of
- the draft's entropy, max q and log q(Y_i), which are known when Y_i is drawn;
- the mean divergence of the 10 positions before, and WVIR, the ratio of its variances in the 10 and the 30 positions
  before (both leave out positions with fewer than 2 before them);
- trained heads' P̂.
Intervals: 95 %, by bootstrap over prompts.

python benchmarks/signals.py                                         # the embedded pair, T = 1 and T = 0
python benchmarks/signals.py --traces DIR ... --draft D --head H ...  # yours
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import embedded
import numpy as np
import torch
from record import TINY, write_result

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.inference.policies.divergence import LONG, variance_ratio
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.tune.heads import load_heads
from accept_head.pair import load_model

DSDE = {"entropy": (-0.339, -0.235), "mean divergence": (-0.164, -0.069), "WVIR": (0.128, -0.031)}  # T = 0, T = 1
RESAMPLES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+")
    parser.add_argument("--draft", default=str(TINY / "draft"))
    parser.add_argument("--head", nargs="*", default=[])
    options = parser.parse_args()
    quiet_libraries()
    folders = options.traces or [embedded.traces("test", 1.0), embedded.traces("test", 0.0)]
    draft, fingerprint = load_model(options.draft, "--draft"), checkpoint_fingerprint(options.draft)
    heads = load_heads(options.head, draft)
    tables = []
    for folder in folders:
        coupled = load_coupled(Path(folder), draft, fingerprint)
        predicted = {
            f"P̂ of {Path(name).name}": score_tokens(coupled, HeadPolicy(head, 0.5, rule="product"))[
                : coupled.positions
            ].numpy()
            for name, head in heads.items()
        }
        rows = correlations(coupled, predicted)
        tables.append({"sampling": coupled.config.sampling.to_dict(), "prompts": len(coupled.lengths), "signals": rows})
        print(f"temperature {coupled.config.sampling.temperature}")
        for name, row in rows.items():
            print(f"  {name:24} r = {row['r']:+.3f} ({row['ci95'][0]:+.3f} to {row['ci95'][1]:+.3f})")
    print(f"wrote {write_result('signals', {'tables': tables, 'dsde_table_2_at_t_0_and_1': DSDE})}")


def correlations(traces: CoupledTraces, predicted: dict[str, np.ndarray]) -> dict[str, Any]:
    records = traces.traces.with_format("numpy")[:]
    truth = np.concatenate(records["acceptance"]).astype(float)
    response = np.repeat(np.arange(len(traces.lengths)), traces.lengths.numpy())
    step = np.concatenate([np.arange(n) for n in traces.lengths.tolist()])
    means, ratios = zip(*(lagging(values) for values in records["divergence"]), strict=True)
    everywhere, later = np.ones(len(truth), dtype=bool), step >= 2
    signals = {
        "entropy": (np.concatenate(records["draft_entropy"]), everywhere),
        "max q": (np.concatenate(records["draft_max_prob"]), everywhere),
        "log q(Y)": (np.concatenate(records["draft_logprob"]), everywhere),
        "mean divergence": (np.concatenate(means), later),
        "WVIR": (np.concatenate(ratios), later),
        **{name: (values, everywhere) for name, values in predicted.items()},
    }
    return {name: pearson(x[used].astype(float), truth[used], response[used]) for name, (x, used) in signals.items()}


def lagging(divergence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each position: the mean divergence of the 10 before it, and WVIR; arbitrary for the first two."""
    known = torch.from_numpy(np.asarray(divergence, dtype=float))
    padded = torch.cat([torch.zeros(LONG, dtype=known.dtype), known])[:-1]
    history = padded.unfold(0, LONG, 1)  # (positions, 30), the newest last
    valid = torch.arange(LONG).flip(0) < torch.arange(len(known))[:, None]
    ratio = variance_ratio(history, valid)
    latest, used = history[:, -10:], valid[:, -10:]
    return ((latest * used).sum(-1) / used.sum(-1).clamp(min=1)).numpy(), ratio.nan_to_num(1.0).numpy()


def pearson(x: np.ndarray, y: np.ndarray, prompt: np.ndarray) -> dict[str, Any]:
    """r, from sums over each prompt, and its interval when prompts are drawn anew."""
    columns = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)
    sums = np.zeros((int(prompt.max()) + 1, 6))
    np.add.at(sums, prompt, columns)
    drawn = draws(len(sums), resamples=RESAMPLES)

    def r(total: np.ndarray) -> np.ndarray:
        n, sx, sy, sxx, syy, sxy = np.moveaxis(total, -1, 0)
        return (n * sxy - sx * sy) / np.sqrt((n * sxx - sx * sx) * (n * syy - sy * sy))

    return {"r": float(r(sums.sum(0))), "ci95": interval(r(drawn @ sums)), "count": len(x)}


if __name__ == "__main__":
    main()
