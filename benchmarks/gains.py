"""Question: does real decoding gain what the ladder says by replay?

Four rungs of the ladder are compared: the default head of then, the paper's head and vLLM's online estimator, each with
the setting that was chosen on dev prompts for its c, and the best fixed K. All decode the 240 test prompts of the
embedded pair for real: greedily, and at T = 1 several times with other random numbers. Replay is of traces of as many
seeds. A gain is the gain over the fixed K, by eq. 3.1 with counted forwards. Intervals, and the difference to the
replayed gain in standard errors (z), are bootstraps over prompts; a prompt is drawn with all its decoded and replayed
responses.

python benchmarks/ladder.py                                    # makes the heads, and ladder.json
python benchmarks/gains.py [--temperatures 1 0] [--seeds 4]    # about a quarter of an hour a seed on one core
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
from ladder import COSTS, RECOMMENDED, coupled, loaded, trained
from record import RESULTS, TINY, write_result
from tqdm import tqdm

from accept_head import Pair, load_pair
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.files import read_json
from accept_head.inference import generate
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed, replay_fixed
from accept_head.inference.tune.rules import ask

HEADS = ("specdecpp", RECOMMENDED)
LEARNER, LEARNER_COSTS = "online-logistic", (0.1,)  # it decodes one prompt at a time, which takes a while
BATCH = 16


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(1.0, 0.0), default=[1.0, 0.0])
    parser.add_argument("--seeds", type=int, default=4, help="runs of each policy, and seeds of traces, at T = 1")
    options = parser.parse_args()
    temperatures = options.temperatures
    ladder = read_json(RESULTS / "ladder.json")["ladder"]
    pair = load_pair(TINY / "target", TINY / "draft")
    rows = [row for temperature in temperatures for row in gains(pair, ladder, temperature, options.seeds)]
    path = RESULTS / "gains.json"
    kept = read_json(path)["rows"] if path.is_file() else []  # of a temperature that is not run again
    rows += [row for row in kept if row["temperature"] not in temperatures]
    worst = max(abs(row["z"]) for row in rows)
    write_result("gains", {"batch": BATCH, "rows": rows}, command=f"python benchmarks/gains.py --seeds {options.seeds}")
    print(f"largest |z| {worst:.2f} of {len(rows)}; wrote {path}")


def gains(pair: Pair, ladder: list[dict[str, Any]], temperature: float, seeds: int) -> list[dict[str, Any]]:
    """One row a rung and c."""
    settings = {
        (row["rung"], row["c"]): row["params"]
        for row in ladder
        if row["temperature"] == temperature
        and (row["rung"] in HEADS or (row["rung"] == LEARNER and row["c"] in LEARNER_COSTS))
    }
    best = {row["c"]: row["params"] for row in ladder if row["temperature"] == temperature and "k" in row["params"]}
    jobs = {name_of(rung, params): params for (rung, _), params in settings.items()}
    jobs |= {name_of("fixed", params): params for params in best.values()}
    runs = range(seeds if temperature else 1)
    replayed = {
        name: sum(replay_one(name, params, temperature, seed) for seed in runs) for name, params in jobs.items()
    }
    decoded = {}
    for name, params in tqdm(jobs.items(), desc=f"T = {temperature:g}"):
        # other random numbers than any trace's, so that the two sides are independent
        decoded[name] = sum(decode(pair, name, params, temperature, 100 + seed) for seed in runs)
    found = []
    for (rung, c), params in settings.items():
        costs = ForwardCosts(t_draft=c, t_target=1.0)
        names = name_of(rung, params), name_of("fixed", best[c])
        real, priced = (np.stack([of[name] for name in names]) for of in (decoded, replayed))
        row = {
            "temperature": temperature,
            "c": c,
            "rung": rung,
            "params": params,
            "best_fixed": best[c]["k"],
            "seeds": len(runs),
        }
        found.append(row | compared(real, priced, costs))
        print({key: value for key, value in found[-1].items() if key != "params"}, flush=True)
    assert {row["c"] for row in found} == set(COSTS)
    return found


def name_of(rung: str, params: Mapping[str, Any]) -> str:
    return f"{rung} {dict(sorted(params.items()))}"


def compared(real: np.ndarray, priced: np.ndarray, costs: ForwardCosts) -> dict[str, Any]:
    """real, priced: (2, n, 4) counts of a policy and of the best fixed K, decoded and replayed."""
    drawn = draws(real.shape[1])

    def gain(totals: np.ndarray) -> np.ndarray:  # (..., 2, 4) → (...)
        speeds = throughputs(totals, costs)
        return speeds[..., 0] / speeds[..., 1] - 1

    values = {"decoded": float(gain(real.sum(1))), "replayed": float(gain(priced.sum(1)))}
    spread = {
        name: gain(np.einsum("rn,pnc->rpc", drawn, counts))
        for name, counts in (("decoded", real), ("replayed", priced))
    }
    intervals = {f"{name}_ci95": interval(gains) for name, gains in spread.items()}
    error = float((spread["decoded"] - spread["replayed"]).std())
    difference = values["decoded"] - values["replayed"]
    return {**values, **intervals, "z": difference / error if error else float(np.sign(difference))}


def replay_one(name: str, params: Mapping[str, Any], temperature: float, seed: int) -> np.ndarray:
    """(n, 4) counts of every test prompt."""
    traces, rung = coupled("test", temperature, seed), name.partition(" {")[0]
    found: list[Replayed]
    if rung == "fixed":
        found = replay_fixed(traces, [params["k"]])
    elif rung == LEARNER:
        costs = ForwardCosts(t_draft=0.1, t_target=1.0)  # it does not look at them
        found = [ask(traces, rung, params["threshold"], costs, params["k_max"])]
    else:
        setting = Setting(**{key: params[key] for key in ("threshold", "k_min", "k_max")})
        found = replay_thresholds(traces, policy_of(rung, params, temperature), [setting], rung)
    return found[0].counts


def decode(pair: Pair, name: str, params: Mapping[str, Any], temperature: float, seed: int) -> np.ndarray:
    """(n, 4) the same of real rounds; one prompt at a time for the estimator, which learns from all rows of a batch."""
    traces, rung = coupled("test", temperature), name.partition(" {")[0]
    tokens, stats = generate(
        pair.target,
        pair.draft,
        traces.traces["prompt_ids"][:],
        policy=policy_of(rung, params, temperature),
        sampling=traces.config.sampling,
        max_new_tokens=traces.config.max_new_tokens,
        batch_size=1 if rung == LEARNER else BATCH,
        end_token_ids=traces.config.end_token_ids,
        seed=seed,
    )
    if temperature == 0 and tokens != [list(ids) for ids in traces.traces["response_ids"][:]]:
        raise RuntimeError(f"{name}: greedy responses are not those of the traces")
    return np.array([[row.generated, row.discarded, row.rounds, row.draft_forwards] for row in stats], dtype=float)


def policy_of(rung: str, params: Mapping[str, Any], temperature: float) -> Any:
    if rung == "fixed":
        return FixedPolicy(params["k"])
    if rung == LEARNER:
        return OnlineLogisticPolicy(params["threshold"], k_max=params["k_max"])
    head = loaded(trained(rung, temperature), temperature)
    return HeadPolicy(
        head, params["threshold"], **{key: params[key] for key in ("k_min", "k_max", "lag") if key in params}
    )


if __name__ == "__main__":
    main()
