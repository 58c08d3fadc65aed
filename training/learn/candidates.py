"""The heads of a run: their bases, the candidates before training, and the outcomes after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.pair import hidden_size, input_embeddings
from accept_head.quality import Quality
from accept_head.signals import SIGNALS
from accept_head.training.learn.base import Labelled, fit_base, qualities, train_quality
from accept_head.training.learn.batches import label_axes
from accept_head.training.learn.data import labelled_places
from accept_head.training.learn.depth_states import DepthStates
from accept_head.training.learn.mixing import Packing
from accept_head.training.learn.recipe import Recipe
from accept_head.training.learn.splits import Splits
from accept_head.training.learn.start import start_heads


class Outcome(NamedTuple):
    """A finished head and its quality.

    dev: its quality on dev traces. train: its quality on the training traces, as in metrics.json. base: the quality of
    its base on dev traces, also of a base alone; None for a head without a base. decay: used in its training; None for
    a base alone.
    """

    name: str
    head: AcceptanceHead
    dev: dict[str, Quality]
    train: dict[str, dict[str, float]]
    base: dict[str, Quality] | None
    decay: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A head to train.

    name: its name in a sweep, "" when it is the only head. One of the candidates with the same name is chosen in the
    end. w_rej: its loss weight of rejection. base: where it starts, a head of its own; None for a head without a base.
    decay: rate per epoch at which its weights shrink at the peak of lr. label: its name in the logs.
    """

    name: str
    head: AcceptanceHead
    w_rej: float
    base: Outcome | None = None
    decay: float = 0.0
    label: str = ""


def fit_bases(
    recipes: dict[str, Recipe], splits: Splits, channels: int, states: DepthStates | None
) -> dict[str, Outcome]:
    """The base of each head, by the head's name. Heads with the same loss weights share one base. states: of traces
    with depths."""
    common = next(iter(recipes.values()))
    packing: Packing = "prefix" if common.packing == "prefix" else "exact"
    axes = label_axes(common.predicts, sees_drawn=True)
    train, dev = (
        Labelled.of(labelled_places(traces, packing, axes, alternatives=alternatives, states=states), axes)
        for traces, alternatives in ((splits.train, int(common.alternatives)), (splits.dev, 0))
    )

    @cache
    def fitted(w_rej: float) -> Outcome:
        head = fit_base(
            train, dev, hidden_size=channels, signals=SIGNALS, predicts=common.predicts, w_acc=common.w_acc, w_rej=w_rej
        )
        quality = qualities(head, dev)
        return Outcome("", head, quality, train_quality(head, train), quality)

    return {name: fitted(recipe.w_rej)._replace(name=name) for name, recipe in recipes.items()}


def make_candidates(
    recipes: dict[str, Recipe], bases: dict[str, Outcome], draft: PreTrainedModel, traces: Dataset, seed: int
) -> list[Candidate]:
    """The heads to train, each with its initial weights. traces: the training traces."""
    common = next(iter(recipes.values()))
    more: dict[str, Any] = {"standardised": common.base}
    if bases:
        of_base = next(iter(bases.values())).head.config  # all bases have the same inputs
        names = ("signals", "signal_mean", "signal_std", "base")
        more |= {name: getattr(of_base, name) for name in names}
    elif common.signals:
        more |= _signal_statistics(traces)
    embeddings = input_embeddings(draft) if common.embedding else None
    if embeddings is not None:
        more["embedding_std"] = float(embeddings.float().square().mean().sqrt())
    candidates = []
    for name, recipe in recipes.items():
        config = HeadConfig(
            hidden_size=hidden_size(draft),
            depth=recipe.depth,
            predicts=recipe.predicts,
            reads="before" if recipe.packing == "prefix" else "drawn",
            width=recipe.width if isinstance(recipe.width, int) else None,
            **more,
        )
        for decay in recipe.decays:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # a head of a sweep starts like the head trained alone
                head = AcceptanceHead(config).attach(embeddings)
            tried = [f"decay{decay:g}"] if len(recipe.decays) > 1 else []
            label = "-".join([name, *tried] if name else tried)
            candidates.append(Candidate(name, head, recipe.w_rej, bases.get(name), decay, label))
    if common.base:
        start_heads([one.head for one in candidates], [one.base.head for one in candidates if one.base])
    return candidates


def _signal_statistics(traces: Dataset) -> dict[str, Any]:
    """The head config's fields about signals, from all positions of the training traces."""
    columns = {name: np.concatenate(traces.with_format("numpy")[name][:]).astype(np.float64) for name in SIGNALS}
    return {
        "signals": SIGNALS,
        "signal_mean": tuple(float(values.mean()) for values in columns.values()),
        "signal_std": tuple(max(float(values.std()), 1e-6) for values in columns.values()),
    }
