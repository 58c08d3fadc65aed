"""Question: how much faster does `accept-head train` become with the draft's states on disk?

The default recipe on the embedded pair, 800 responses, T = 1: one head, and a sweep of 20. Whole processes, one after
another: without the cache, with an empty one (which the run fills), and with that one filled. `fit` is the training
with the pass that fills the cache; wall and CPU seconds have start-up besides. Then: how far the weights and dev binary
KL of a head from the cache are from those of the head without.

python benchmarks/feature_cache.py [--repeats 2] [--only JOB]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from record import REPOSITORY, RESULTS, write_result
from sweep import as_list, largest_difference, train

from accept_head.files import read_json

TRACES = REPOSITORY / "runs" / "vllm" / "t1" / "traces"  # as benchmarks/ladder.py makes them
SMALL_STEPS = {"batch_size": 4, "micro_batch_size": 4}
JOBS: dict[str, dict[str, Any]] = {
    "one head": {**SMALL_STEPS, "depth": 2, "embedding": "true", "epochs": 6},
    "20 heads": {
        **SMALL_STEPS,
        "depth": as_list((0, 1, 2, 3, 4)),
        "w_rej": as_list((1, 3, 6, 12)),
        "embedding": "true",
        "epochs": 2,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    options = parser.parse_args()
    path = RESULTS / "feature_cache.json"
    jobs = read_json(path)["jobs"] if path.is_file() else {}  # those that are not run again stay
    for name in options.only:
        with tempfile.TemporaryDirectory() as temporary:
            jobs[name] = measure(JOBS[name], Path(temporary), options.repeats)
        write_result("feature_cache", {"jobs": jobs}, command="python benchmarks/feature_cache.py")
    print(f"wrote {path}")


def measure(settings: dict[str, Any], folder: Path, repeats: int) -> dict[str, Any]:
    """The fastest of the repeats, of each of the three."""
    times: dict[str, list[dict[str, float]]] = {"without": [], "filling": [], "filled": []}
    cache = folder / "cache"
    for _ in range(repeats):
        shutil.rmtree(cache, ignore_errors=True)
        for name, seconds in times.items():
            more = {} if name == "without" else {"cache": cache}
            seconds.append(train("default", TRACES, folder / name, {**settings, **more}))
            print(name, {key: round(value, 1) for key, value in seconds[-1].items()}, flush=True)
    best = {name: {key: min(one[key] for one in ones) for key in ones[0]} for name, ones in times.items()}
    found: dict[str, Any] = {
        "settings": settings,
        "repeats": repeats,
        "load_average": os.getloadavg(),
        "seconds": best,
        "cache_bytes": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()),
        "speedup": {
            name: {key: best["without"][key] / best[name][key] for key in ("fit", "cpu")}
            for name in ("filling", "filled")
        },
    }
    if (folder / "filled" / "metrics.json").is_file():
        kl = {name: read_json(folder / name / "metrics.json")["dev"]["token"]["binary_kl"] for name in times}
        found["dev_binary_kl"] = kl
        found["largest_weight_difference"] = {
            "filled to without": largest_difference(folder / "filled", folder / "without"),
            "filled to filling": largest_difference(folder / "filled", folder / "filling"),
        }
    print({name: value for name, value in found.items() if name != "settings"}, flush=True)
    return found


if __name__ == "__main__":
    main()
