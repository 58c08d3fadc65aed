"""`accept-head tune`: which threshold, which bounds? Every setting is replayed on coupled traces and priced in seconds.

The policies that need no training go through the same search on the same traces, so that a comparison is fair.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from transformers import PreTrainedModel

from accept_head.console import make_console
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.files import read_json, writable_file, write_json
from accept_head.head import AcceptanceHead
from accept_head.head_folder import head_folder
from accept_head.head_use import check_unseen
from accept_head.hub import load_head
from accept_head.inference.costs.files import pair_costs, read_costs
from accept_head.inference.policies import EntropyPolicy, HeadPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.comparison import compare, throughputs
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.truth import InformedTables, informed_tables, target_loader
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.tune.objectives import Objective, objective_of
from accept_head.inference.tune.rules import LEARNERS, RULES, ask, checked_rules, spec_of
from accept_head.pair import checkpoint_fingerprint, hidden_size, input_embeddings, load_model
from accept_head.trace import CONFIG_NAME, finished_config
from accept_head.version import VERSION

Search = Literal["grid", "cost"]
DECODING_NAME = "decoding.json"
BOUNDS = ("informed", "oracle")  # rows that are no policies
PROBABILITIES = ThresholdPolicy.grid
K_MIN, K_MAX, LONGEST = (1, 2), (4, 8, 20), 20


def tune(
    traces: str,
    draft: str,
    out: str = "tuned.json",
    head: list[str] | None = None,
    costs: str | None = None,
    t_draft: float | None = None,
    t_target: float | None = None,
    target_times: float = 1.0,
    thresholds: list[float] | None = None,
    k_min: list[int] | None = None,
    k_max: list[int] | None = None,
    lag: list[int] | None = None,
    rules: list[str] | None = None,
    search: Search | None = None,
    objective: Objective = "mean",
    target: str | None = None,
    max_prompts: int | None = None,
    write_decoding: bool = True,
    seed: int = 0,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Choose thresholds and bounds by replay on traces that no head was trained on, for given forward costs.

    The first run on a trace folder lets the draft roll out what follows each rejection and keeps that beside the
    traces; from then on other heads, costs and grids take seconds.

    Args:
        traces: Folder made by `accept-head collect`, of prompts that the heads were not trained on.
        draft: The draft that the traces were made with.
        out: JSON file to write: all tuned policies, every fixed draft length and the oracle, compared.
        head: Heads to tune. A local folder gets a `decoding.json` with the choice.
        costs: JSON file by `accept-head profile`.
        t_draft: Seconds of one draft forward, in place of `costs`.
        t_target: Seconds of one target forward.
        target_times: What if the target were so many times as slow? Nothing else changes.
        thresholds: Thresholds to try for heads, confidence and max-prob; 0.05, 0.10, ... 0.95 when left out.
        k_min: Fewest tokens after which a rule may stop, to try; 1 and 2 when left out.
        k_max: Most tokens of a round, to try; 4, 8 and 20 when left out.
        lag: Lags to try for a head that reads the state at a drawn token; 0 and 1 when left out.
        rules: Policies without training to tune, by name; all of them when left out, which takes a minute or two.
        search: How heads are tuned. `cost`: the threshold at which one more token just pays for itself, with k_min 1
            and the largest k_max; for the objective `mean`; `thresholds` and `k_min` are then of the rules alone.
            `grid`: every threshold at all bounds. When left out: `grid` where `thresholds`, `k_min` or another
            objective are given, else `cost`.
        objective: `mean`: tokens/s over all traces; `worst-domain`: tokens/s in the domain where that is lowest;
            `discard`: least drafted in vain at no more target calls than the best fixed length, of which 97.5 % of
            resamples of the prompts must agree.
        target: The target that the traces were made with, to add the informed bound: what a policy could reach that
            knows how likely each token is accepted. Asked once; what it said is kept beside the traces.
        max_prompts: Use the first so many traces.
        write_decoding: Write decoding.json; without it, heads are left as they are.
        seed: Seed of the bootstrap.
        dtype: float32, bfloat16, float16, or auto; of the models.
        trust_remote_code: Run model code that comes with the models.
    """
    path = writable_file(Path(out))
    priced = read_costs(costs, t_draft, t_target, target_times)
    if search is None:
        search = "cost" if thresholds is k_min is None and objective == "mean" else "grid"
    grid = Grid(
        thresholds=_checked("thresholds", thresholds, PROBABILITIES, 0.0, 1.0),
        k_min=_checked("k_min", k_min, K_MIN, 1),
        k_max=_checked("k_max", k_max, K_MAX, 1),
        lags=_checked("lag", lag, (0, 1), 0, 1),
        rules=checked_rules(rules),
        search=search,
    )
    if not grid.bounds:
        raise InputError(f"no k_min of {list(grid.k_min)} is at most any k_max of {list(grid.k_max)}")
    _check_read(grid, bool(head), thresholds=thresholds, k_min=k_min)
    if search == "cost" and objective != "mean":
        raise InputError(f"search is 'cost' and objective {objective!r}, expected 'mean' with it")
    if max_prompts is not None and max_prompts < 1:
        raise InputError(f"max_prompts is {max_prompts}, expected a positive integer")
    model = load_model(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
    fingerprint = checkpoint_fingerprint(draft)
    heads = load_heads(head or [], model, fingerprint)
    if lag is not None and all(each.config.reads == "before" for each in heads.values()):
        raise InputError(f"lag is {lag}, which only a --head that reads the state at a drawn token has: there is none")
    for name in heads:
        check_unseen(name, head_folder(name), Path(traces), finished_config(Path(traces)))
    load_target = target_loader(Path(traces), target, dtype, trust_remote_code)
    for name in heads if write_decoding else ():
        if Path(name).is_dir():
            writable_file(Path(name) / DECODING_NAME, "--head")
    longest = max(LONGEST, *grid.k_max)
    coupled = load_coupled(Path(traces), model, fingerprint, k_max=longest, max_prompts=max_prompts)
    truth = informed_tables(coupled, model, load_target)
    # What a policy of this file predicts, as it will where it decodes; a target that is only imagined has no file.
    real = costs if target_times == 1 else None
    pair = pair_costs(Path(real)) if real else None
    tuned = search_all(coupled, heads, priced, grid, objective, pair, truth, seed=seed)
    rows = tuned.rows(seed, real)
    decodings = {name: decoding(tuned, name, rows) for name in heads}
    write_json(
        path,
        {
            "costs": asdict(priced),
            "objective": objective,
            "traces": described(coupled),
            "policies": rows,
            "date": datetime.date.today().isoformat(),
        },
    )
    if write_decoding:
        for name, values in decodings.items():
            if Path(name).is_dir():
                write_json(Path(name) / DECODING_NAME, values)
    console = make_console(unseen_width=132 if truth is None else 160)
    console.print(tuned_table(rows, tuned))
    for name in heads if write_decoding else ():
        console.print(
            f"wrote {Path(name) / DECODING_NAME}" if Path(name).is_dir() else f"{name} is not a local folder: its "
            f"choice is in {path} only", highlight=False
        )  # fmt: skip
    console.print(f"wrote {path}", highlight=False)
    for name, policy in tuned.chosen.items() if objective == "discard" else ():
        if policy.total.verification_rate > tuned.best_fixed.total.verification_rate:
            console.print(f"{name}: no setting calls the target as seldom as {tuned.best_fixed.name}.", highlight=False)
    if all(row["speedup"] <= 1 for row in rows if row["name"] not in ("none", *BOUNDS)):
        console.print("No policy is faster than the target alone at these costs: decode with --policy none.")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to try. thresholds: of heads, and of the rules whose own grid is these probabilities; nats: of entropy.
    rules: the policies that need no training, by name. search: how heads are tuned."""

    thresholds: Sequence[float] = PROBABILITIES
    nats: Sequence[float] = EntropyPolicy.grid
    k_min: Sequence[int] = K_MIN
    k_max: Sequence[int] = K_MAX
    lags: Sequence[int] = (0, 1)
    rules: Sequence[str] = (*RULES, "adaedl")
    search: Search = "grid"

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(low, high) for low in self.k_min for high in self.k_max if low <= high]

    def of(self, rule: str) -> Sequence[float]:
        """Thresholds of a rule that needs no training."""
        own = _own(rule)
        return self.nats if rule == "entropy" else self.thresholds if own == PROBABILITIES else own

    def settings(self, thresholds: Sequence[float]) -> list[Setting]:
        return [Setting(threshold=t, k_min=low, k_max=high) for low, high in self.bounds for t in thresholds]


def _own(rule: str) -> Sequence[float]:
    """A rule's thresholds where none are given."""
    own: Sequence[float] = getattr(RULES[rule], "grid", PROBABILITIES)
    return own


def _check_read(grid: Grid, has_heads: bool, **given: Sequence[float] | None) -> None:
    """Raises InputError for thresholds or a k_min that nothing would read: by cost heads have neither."""
    readers = {"thresholds": [name for name in RULES if _own(name) == PROBABILITIES], "k_min": list(RULES)}
    for name, values in given.items():
        read = (has_heads and grid.search == "grid") or set(readers[name]) & set(grid.rules)
        if values is not None and not read:
            rules = ", ".join(readers[name])
            raise InputError(
                f"{name} is {values}, but nothing here reads it: expected a --head with --search grid, or one of the "
                f"rules {rules}"
            )


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The search's outcome. fixed: every draft length. families: all settings that were tried of each. chosen: the best
    of each family. informed: None where the target was not asked."""

    traces: CoupledTraces
    costs: ForwardCosts
    objective: Objective
    none: Replayed
    fixed: list[Replayed]
    oracle: Replayed
    families: dict[str, list[Replayed]]
    chosen: dict[str, Replayed]
    informed: Replayed | None = None

    def rows(self, seed: int = 0, costs_file: str | None = None) -> list[dict[str, Any]]:
        """One row a policy, in the form of the public surface (architecture page); spec: what `--policy` takes, with
        costs_file for policies that predict seconds."""
        bounds = [self.informed, self.oracle] if self.informed else [self.oracle]
        policies = [self.none, *self.fixed, *self.chosen.values(), *bounds]
        rows = compare([policy.measured() for policy in policies], self.costs, seed=seed)
        return [{**row, **({"spec": spec_of(row, costs_file)} if row["name"] not in BOUNDS else {})} for row in rows]

    @property
    def best_fixed(self) -> Replayed:
        return fastest(self.fixed, self.costs)


def fastest(policies: Sequence[Replayed], costs: ForwardCosts) -> Replayed:
    """By tokens/s."""
    return max(policies, key=lambda policy: float(throughputs(policy.counts.sum(0), costs)))


def search_all(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    grid: Grid,
    objective: Objective = "mean",
    pair: PairCosts | None = None,
    truth: InformedTables | None = None,
    *,
    seed: int = 0,
) -> Tuned:
    """Replay everything and choose. heads: by the name that a SPEC would give them. pair: for `ask`. truth: for the
    informed bound. seed: for `objective_of`."""
    none, *fixed = replay_fixed(traces, range(traces.k_max + 1))
    families = {name: _replay_head(traces, name, head, grid, costs) for name, head in heads.items()}
    for name in grid.rules:
        if name in RULES:
            families[name] = replay_thresholds(traces, RULES[name](), grid.settings(grid.of(name)), name)
        else:
            families[name] = [ask(traces, name, v, costs, max(grid.k_max), pair) for v in _values(name, costs)]
    value = objective_of(objective, traces.domains, costs, fastest(fixed, costs), seed=seed)
    return Tuned(
        traces=traces,
        costs=costs,
        objective=objective,
        none=none,
        fixed=fixed,
        oracle=replay_oracle(traces),
        families=families,
        chosen={name: max(settings, key=value) for name, settings in families.items()},
        informed=replay_informed(traces, truth, costs) if truth else None,
    )


def _values(name: str, costs: ForwardCosts) -> Sequence[float]:
    """What to try of a learner. Leviathan's c is known; others may do better, as its i.i.d. model is not the truth."""
    values = LEARNERS[name].values
    return sorted({round(costs.ratio, 4), *values}) if name == "leviathan" else values


def _replay_head(
    traces: CoupledTraces, name: str, head: AcceptanceHead, grid: Grid, costs: ForwardCosts
) -> list[Replayed]:
    lags: Iterable[int | None] = (None,) if head.config.reads == "before" else grid.lags
    policies = [HeadPolicy(head, 0.5, lag=lag) for lag in lags]
    if grid.search == "cost":
        return [cost_aware(traces, p, costs, name=f"head:{name}", k_max=max(grid.k_max))[1] for p in policies]
    settings = grid.settings(grid.thresholds)
    return [r for policy in policies for r in replay_thresholds(traces, policy, settings, f"head:{name}")]


def decoding(tuned: Tuned, head: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`decoding.json`: how to decode with this head, for which costs, and what to expect."""
    chosen = tuned.chosen[head]
    row = next(row for row in rows if row["name"] == chosen.name and row["params"] == chosen.params)
    return {
        **chosen.params,
        "objective": tuned.objective,
        "costs": asdict(tuned.costs),
        "expected": {name: value for name, value in row.items() if name not in ("name", "params", "spec")},
        "best_fixed": tuned.best_fixed.params["k"],
        "traces": described(tuned.traces),
        "accept_head": VERSION,
        "date": datetime.date.today().isoformat(),
    }


def described(traces: CoupledTraces) -> dict[str, Any]:
    """Which traces a figure is of."""
    return {
        "fingerprint": traces.config.fingerprint(),
        "prompts": len(traces.lengths),
        "tokens": traces.positions,
        "sampling": traces.config.sampling.to_dict(),
        "max_new_tokens": traces.config.max_new_tokens,
    }


def load_heads(names: Sequence[str], draft: PreTrainedModel, fingerprint: str) -> dict[str, AcceptanceHead]:
    """Heads by name. Raises InputError when one does not fit the draft, was trained on another, or is named twice."""
    heads = {}
    for name in names:
        if name in heads:
            raise InputError(f"--head {name}: given twice")
        heads[name] = load_head(
            name, hidden_size=hidden_size(draft), device=draft.device, embeddings=input_embeddings(draft)
        )
        recorded = head_folder(name) / CONFIG_NAME  # whatever version of it: only the draft matters here
        trained = read_json(recorded) if recorded.is_file() else {}
        if trained.get("draft_fingerprint", fingerprint) != fingerprint:
            raise InputError(f"--head {name}: trained on another draft ({trained.get('draft')}); --draft must be it")
    return heads


def _checked(name: str, given: Sequence[Any] | None, default: Sequence[Any], low: float, high: float = 64) -> Any:
    values = tuple(default) if given is None else tuple(given)
    if not values or not all(low <= value <= high for value in values):
        raise InputError(f"{name} is {list(values)}, expected numbers from {low:g} to {high:g}")
    return values


def tuned_table(rows: list[dict[str, Any]], tuned: Tuned) -> Table:
    """For a terminal: the target alone, the best fixed length and its neighbours, what was tuned, and the bounds."""
    best = tuned.best_fixed.params["k"]
    table = Table(
        title=f"replayed on {len(tuned.traces.lengths)} traces, {tuned.traces.positions} tokens; throughput by eq. 3.1",
        caption=f"c = {tuned.costs.ratio:.3f}; chosen by {tuned.objective}; 95 % bootstrap over prompts",
    )
    columns = ("policy", "k", "discard\nrate", "verification\nrate", "tokens/s", "speed-up", "gain over\nbest fixed K")
    shares = [("oracle gap\nclosed", "oracle_gap_closed"), ("informed\ngap closed", "informed_gap_closed")]
    shares = [(title, name) for title, name in shares if name in rows[0]]
    for column in (*columns, *(part for title, _ in shares for part in (title, "95 %"))):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        params = row["params"]
        if "k" in params and abs(params["k"] - best) > 1:
            continue
        kind, _, rest = row["name"].rpartition("/")  # a head's folder without those it is in
        table.add_row(
            (f"head:{rest}" if kind else rest) + (f", lag {params['lag']}" if "lag" in params else ""),
            f"{params.get('k_min', 0)} to {params['k_max']}" if "k_max" in params else "",
            f"{row['discard_rate']:.3f}",
            f"{row['verification_rate']:.3f}",
            f"{row['throughput']:.1f}",
            f"{row['speedup']:.3f}x",
            f"{100 * row['gain_over_best_fixed']:+.1f} %",
            *(part for _, name in shares for part in (f"{100 * row[name]:+.1f} %", _span(row, name))),
        )
    return table


def _span(row: Mapping[str, Any], name: str) -> str:
    """The interval of a share, of what was tuned."""
    low, high = row["ci95"][name]
    tuned = row["name"].partition(":")[0] not in ("none", "fixed", *BOUNDS)
    return f"{100 * low:.1f} to {100 * high:.1f}" if tuned else ""
