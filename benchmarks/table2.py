"""Question: does T = t_draft·N_draft + t_target·N_target hold? The paper's table 2: the regression of eq. 3.1.

Each response is one observation (N_draft, N_target, seconds), decoded alone, batch 1. Settings: stand-alone (the draft
alone and the target alone), SpecDec (fixed lengths) and SpecDec++ (a head at several thresholds); by domain, and all
together. As in the paper, the throughput of eq. 3.1 is then compared with the measured one.

python benchmarks/table2.py --head runs/demo/head                 # the embedded pair
python benchmarks/table2.py --target T --draft D --prompts P.jsonl --head H
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from record import TINY, write_result

from accept_head import Sampling, load_pair
from accept_head.command.libraries import quiet_libraries
from accept_head.inference import generate
from accept_head.pair import Pair
from accept_head.prompts import Prompt, load_prompts

FIXED, THRESHOLDS = (1, 2, 4, 8), (0.1, 0.3, 0.5, 0.7, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY / "target"))
    parser.add_argument("--draft", default=str(TINY / "draft"))
    parser.add_argument("--prompts", default=str(TINY / "prompts" / "test.jsonl"))
    parser.add_argument("--head", required=True)
    parser.add_argument("--max_prompts", type=int, default=60)
    parser.add_argument("--max_new_tokens", type=int, default=80)
    options = parser.parse_args()
    quiet_libraries()
    pair = load_pair(options.target, options.draft)
    prompts = load_prompts(options.prompts, pair.tokenizer, max_prompts=options.max_prompts)
    speculative = {
        "SpecDec": [f"fixed:{k}" for k in FIXED],
        "SpecDec++": [f"head:{options.head}:{h}" for h in THRESHOLDS],
    }
    observed = observe(pair, prompts, speculative, options.max_new_tokens)
    rows = []
    for domain in [*sorted({prompt.domain for prompt in prompts}), None]:
        rows += [row for row in regressions(observed, domain) if row]
    for row in rows:
        print({key: value for key, value in row.items() if key != "errors"})
    print(f"wrote {write_result('table2', {'prompts': len(prompts), 'rows': rows})}")


def observe(pair: Pair, prompts: list[Prompt], settings: dict[str, list[str]], new_tokens: int) -> list[dict[str, Any]]:
    """All responses, prompt by prompt with every policy in turns, so that a busy moment of the machine hits all."""
    jobs = [("target alone", "none", pair.target), ("draft alone", "none", pair.draft)]
    jobs += [(setting, spec, pair.target) for setting, specs in settings.items() for spec in specs]
    observed = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        for setting, spec, target in jobs:
            begin = time.perf_counter()
            _, (stats,) = generate(
                target,
                pair.draft,
                [prompt.ids],
                policy=spec,
                sampling=Sampling(),
                max_new_tokens=new_tokens,
                tokenizer=pair.tokenizer,
            )
            seconds = time.perf_counter() - begin
            if number:  # the first is a warm-up
                counts = {"drafts": stats.draft_forwards, "targets": stats.rounds, "tokens": stats.generated}
                observed.append({"setting": setting, "domain": prompt.domain, "seconds": seconds, **counts})
    return observed


def regressions(observed: list[dict[str, Any]], domain: str | None) -> list[dict[str, Any] | None]:
    mine = [row for row in observed if domain is None or row["domain"] == domain]
    alone = {
        role: fit([row for row in mine if row["setting"] == f"{role} alone"], ["targets"])
        for role in ("draft", "target")
    }
    base = {"domain": domain or "all"}
    rows: list[dict[str, Any] | None] = [
        {
            **base,
            "setting": "stand-alone",
            "t_draft": alone["draft"]["coefficients"][0],
            "t_target": alone["target"]["coefficients"][0],
            "r_squared": [alone["draft"]["r_squared"], alone["target"]["r_squared"]],
        }
    ]
    for setting in ("SpecDec", "SpecDec++"):
        found = fit([row for row in mine if row["setting"] == setting], ["drafts", "targets"])
        rows.append(
            {
                **base,
                "setting": setting,
                "t_draft": found["coefficients"][0],
                "t_target": found["coefficients"][1],
                "r_squared": found["r_squared"],
                "median_relative_error_of_throughput": found["error"],
            }
        )
    return rows


def fit(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    """Least squares through the origin, as in the paper. Responses that took longer than 3 deviations (by the median
    absolute one) more than fitted are left out once: on a shared machine somebody else had the processor."""
    features = np.array([[row[column] for column in columns] for row in rows], dtype=float)
    seconds = np.array([row["seconds"] for row in rows])
    coefficients, *_ = np.linalg.lstsq(features, seconds, rcond=None)
    off = seconds - features @ coefficients
    kept = np.abs(off - np.median(off)) <= 3 * 1.4826 * np.median(np.abs(off - np.median(off)))
    features, seconds = features[kept], seconds[kept]
    coefficients, *_ = np.linalg.lstsq(features, seconds, rcond=None)
    fitted = features @ coefficients
    unexplained, total = np.square(seconds - fitted).sum(), np.square(seconds - seconds.mean()).sum()
    return {
        "coefficients": coefficients.tolist(),
        "r_squared": float(1 - unexplained / total),
        "error": float(np.median(np.abs(fitted / seconds - 1))),
    }


if __name__ == "__main__":
    main()
