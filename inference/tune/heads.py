"""Loading of heads by name, for one draft."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.head.network import AcceptanceHead
from accept_head.head.saved import load_head
from accept_head.hub.folder import head_folder
from accept_head.pair import hidden_size, input_embeddings
from accept_head.trace.config import CONFIG_NAME


def load_heads(names: Sequence[str], draft: PreTrainedModel, fingerprint: str) -> dict[str, AcceptanceHead]:
    """Heads by name. Raises InputError when one does not fit the draft, was trained on another, or is named twice."""
    heads = {}
    for name in names:
        if name in heads:
            raise InputError(f"--head {name}: given twice")
        heads[name] = load_head(
            name, hidden_size=hidden_size(draft), device=draft.device, embeddings=input_embeddings(draft)
        )
        recorded = head_folder(name) / CONFIG_NAME  # of any version: only the draft matters here
        trained = read_json(recorded) if recorded.is_file() else {}
        if trained.get("draft_fingerprint", fingerprint) != fingerprint:
            raise InputError(f"--head {name}: trained on another draft ({trained.get('draft')}); --draft must be it")
    return heads
