"""The rules that a report shows, each at its chosen setting.

A head's setting comes from its decoding.json, and other settings from a file by `tune`. Missing settings are chosen on
the report's own traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accept_head.cost import ForwardCosts
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.saved_head import read_decoding
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed
from accept_head.inference.tune.files import DECODING_NAME
from accept_head.inference.tune.grid import K_MAX, Grid
from accept_head.inference.tune.rules import RULES
from accept_head.inference.tune.search import search_all

SHOWN = tuple(name for name in RULES if name != "svip")  # svip is `entropy` on another scale, with the same curve
Choice = dict[str, Any]  # threshold, k_min, k_max and, for some heads, lag


def read_choices(heads: Sequence[str], tuned: Mapping[str, Any]) -> dict[str, Choice]:
    """The chosen settings that are on record, by name of the head or rule."""
    choices = {}
    for row in tuned.get("policies", []):
        name, _, _ = str(row.get("name")).rpartition(":")
        if "threshold" in row.get("params", {}):
            choices[name.removeprefix("head:")] = dict(row["params"])
    for name in heads:
        if (Path(name) / DECODING_NAME).is_file():
            choices[name], _ = read_decoding(name, Path(name))
    return choices


def rules_of(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    chosen: Mapping[str, Choice],
) -> dict[str, Rule]:
    """Every rule at its setting in `chosen`, else at the best setting on these traces. Keys are short names."""
    grid = Grid(k_max=sorted({min(most, traces.k_max) for most in K_MAX}))
    missing = [name for name in (*heads, *SHOWN) if "threshold" not in chosen.get(name, {})]
    found = (
        search_all(traces, {name: heads[name] for name in heads if name in missing}, costs, grid) if missing else None
    )
    short = {name: short_name(name) for name in heads}
    if len(set(short.values())) < len(short):
        short = {name: name for name in heads}
    rules = {}
    for name in (*heads, *SHOWN):
        choice = found.chosen[name].params if found and name in missing else chosen[name]
        choice = {"k_min": 1, "k_max": traces.k_max, **choice}
        if name in heads:
            policy: ThresholdPolicy = HeadPolicy(heads[name], 0.5, lag=choice.get("lag"))
        else:
            policy = RULES[name]()
        values = grid.of(name) if name in RULES else grid.thresholds
        label = short.get(name, name)
        rules[label] = Rule(policy, label, values, choice, name in missing)
    return rules


class Rule:
    """One family of threshold rules, with its chosen setting."""

    def __init__(self, policy: ThresholdPolicy, name: str, thresholds: Sequence[float], choice: Choice, here: bool):
        self.policy, self.name, self.thresholds, self.chosen_here = policy, name, thresholds, here
        self.setting = Setting(threshold=choice["threshold"], k_min=choice["k_min"], k_max=choice["k_max"])

    def accepting(self, scores: torch.Tensor) -> torch.Tensor:
        """(M,): P̂ of each token, from its scores."""
        return scores[..., 0] if self.policy.predicts_next else scores

    def curve(self, traces: CoupledTraces) -> list[Replayed]:
        """The replay of every threshold at the chosen bounds, the chosen threshold last."""
        others = [value for value in self.thresholds if value != self.setting.threshold]
        settings = [Setting(threshold=v, k_min=self.setting.k_min, k_max=self.setting.k_max) for v in others]
        return replay_thresholds(traces, self.policy, [*settings, self.setting], self.name)


def short_name(name: str) -> str:
    return Path(name).name or name
