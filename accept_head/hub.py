"""A head as a folder: weights, config, what it was trained on, how good it is, and a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import atomic_path, write_json
from accept_head.head import AcceptanceHead
from accept_head.trace import TraceConfig

METRICS_NAME = "metrics.json"
TRAINING_NAME = "training_config.json"


def save_head(
    head: AcceptanceHead,
    folder: Path,
    *,
    metrics: dict[str, Any],
    training: dict[str, Any],
    traces: TraceConfig,
) -> None:
    """Write the whole folder, atomically: model.safetensors, config.json, metrics.json, training_config.json,
    trace_config.json (both models and the sampling settings) and README.md."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "README.md").write_text(model_card(head, metrics, traces), encoding="utf-8")
        head.save_pretrained(temporary)
        write_json(temporary / METRICS_NAME, metrics)
        write_json(temporary / TRAINING_NAME, training)
        traces.save(temporary)


def load_head(
    name: str | Path, *, hidden_size: int, device: Any = "cpu", embeddings: Tensor | None = None
) -> AcceptanceHead:
    """Load a head for a draft with this hidden size. Raises InputError naming the head when it does not fit.

    embeddings: (vocab, hidden_size) the draft's input embedding matrix, for a head that reads it.
    """
    head = AcceptanceHead.from_pretrained(name)
    if head.config.hidden_size != hidden_size:
        raise InputError(
            f"{name}: the head's hidden_size is {head.config.hidden_size}, but the draft's is {hidden_size}; "
            "a head belongs to the draft it was trained on"
        )
    try:
        return head.to(device).attach(embeddings)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def model_card(head: AcceptanceHead, metrics: dict[str, Any], traces: TraceConfig) -> str:
    """README.md of a head: what it belongs to and its measured quality."""
    rows = "\n".join(
        f"| {prediction} | {values['count']} | {values['binary_kl']:.4f} | {values['constant_kl']:.4f} | "
        f"{values['brier']:.4f} | {values['ece']:.4f} | {values['auroc']:.4f} | "
        f"{values['mean_predicted']:.3f} / {values['mean_observed']:.3f} |"
        for prediction, values in metrics["dev"].items()
    )
    sampling = traces.sampling
    return f"""---
library_name: accept-head
tags:
- speculative-decoding
- acceptance-prediction
---
# Acceptance prediction head

Predicts, from the draft's last hidden state, whether a drafted token will be accepted (SpecDec++, arXiv:2405.19715).

- draft: `{traces.draft}`
- target: `{traces.target}`
- sampling: temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}, min-p {sampling.min_p}
- head: depth {head.config.depth}, hidden size {head.config.hidden_size}, predicts {head.config.predicts}

| prediction | dev positions | binary KL, nats | of the best constant | Brier | ECE | AUROC | predicted / observed |
|---|--:|--:|--:|--:|--:|--:|--:|
{rows}

    from accept_head import AcceptanceHead
    head = AcceptanceHead.from_pretrained("this folder")
"""
