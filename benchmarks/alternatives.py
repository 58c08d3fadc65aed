"""Question: how much text do alternatives to each drawn token save a head? (`collect --alternatives`)

The default recipe at T = 1 on the embedded pair, without top-k: trained on the first prompts of one seed of train
text, with no alternatives, with 1, 4 or 8 to each drawn token; seeds 0 and 1 of training. Thresholds and bounds are
chosen on the dev prompts and judged on the test prompts, as in ladder.py; binary KL and ECE are of the tokens drawn on
the dev prompts. Missing traces and heads are made first, under runs/.

python benchmarks/alternatives.py [--prompts 100 200 400 800]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ladder import COSTS, DRAFT, TARGET, TEXT, collected, coupled, head_settings, judged, loaded, part_of
from record import REPOSITORY, write_result

from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.trace.config import CONFIG_NAME
from accept_head.trace.shards import read_traces
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

WORK = REPOSITORY / "runs" / "alternatives"
MOST = 8
DRAWS = {100: (0, 4), 200: (0, 1, 4, 8), 400: (0, 4), 800: (0, 1, 4, 8)}  # by prompts
SEEDS = (0, 1)


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=int, choices=DRAWS, default=list(DRAWS))
    options = parser.parse_args()
    rows = []
    for prompts in options.prompts:
        folder = part_of(text(), str(prompts), lambda index, _, n=prompts: index < n)
        positions = sum(map(len, read_traces(folder)[1]["draft_ids"]))
        for draws in DRAWS[prompts]:
            for seed in SEEDS:
                about = {"prompts": prompts, "positions": positions, "alternatives": draws, "seed": seed}
                rows += [{**about, **row} for row in head(folder, f"{prompts} prompts, {draws} draws", draws, seed)]
        path = write_result("alternatives", {"costs": COSTS, "text": TEXT, "rows": rows})
    print(f"wrote {path}")


def text() -> Path:
    """One seed of train text, with as many alternatives as any head learns of."""
    folder = WORK / "train"
    if not (folder / CONFIG_NAME).is_file():
        sizes = {"batch_size": 40, "alternatives": MOST}
        collect(
            TARGET, DRAFT, responses=str(collected("train", 1.0)), out=str(folder), temperature=1.0, top_k=0, **sizes
        )
    return folder


def head(folder: Path, name: str, draws: int, seed: int) -> list[dict[str, Any]]:
    """Its quality on dev prompts and its gain on test prompts, a row for each c."""
    out = WORK / f"{folder.name}_{draws}_{seed}"
    if not (out / "model.safetensors").is_file():
        train(
            traces=str(folder),
            draft=DRAFT,
            dev_traces=str(collected("dev", 1.0)),
            out=str(out),
            cache=str(WORK / "features"),
            seed=seed,
            alternatives=draws,
        )
    dev = read_json(out / "metrics.json")["dev"]["token"]
    quality = {"dev_binary_kl": dev["binary_kl"], "dev_ece": dev["ece"]}
    made = loaded(out, 1.0)
    settings = [{name: head_settings(coupled(split, 1.0), made)} for split in ("dev", "test")]
    kept = ("c", "params", "gain_over_best_fixed", "informed_gap_closed")
    return [
        {**quality, **{key: row[key] for key in kept if key in row}, "ci95": row["ci95"]["gain_over_best_fixed"]}
        for row in judged(*settings, 1.0)
        if row["rung"] == name
    ]


if __name__ == "__main__":
    main()
