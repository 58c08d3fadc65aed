"""Save a head as a folder, and load it: weights, config, training data, metrics and model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import atomic_path, write_json
from accept_head.head.network import AcceptanceHead
from accept_head.hub.card import CardFacts, model_card
from accept_head.hub.folder import TRAINING_NAME
from accept_head.trace.config import TraceConfig

METRICS_NAME = "metrics.json"


def save_head(
    head: AcceptanceHead,
    folder: Path,
    *,
    metrics: dict[str, Any],
    training: dict[str, Any],
    traces: TraceConfig,
) -> None:
    """Write the whole folder atomically.

    It holds model.safetensors, config.json, metrics.json, training_config.json, trace_config.json (both models and the
    sampling settings) and README.md.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        card = model_card(CardFacts(config=head.config, traces=traces, metrics=metrics))
        (temporary / "README.md").write_text(str(card), encoding="utf-8")
        head.save_pretrained(temporary)
        write_json(temporary / METRICS_NAME, metrics)
        write_json(temporary / TRAINING_NAME, training)
        traces.save(temporary)


def load_head(
    name: str | Path, *, hidden_size: int, device: Any = "cpu", embeddings: Tensor | None = None
) -> AcceptanceHead:
    """Load a head for a draft with this hidden size. name: a folder or a name on the Hub.

    embeddings: (vocab, hidden_size) the draft's input embedding matrix, for a head that reads it.

    Raises InputError naming the head when it does not fit, or as `AcceptanceHead.from_pretrained` does.
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
