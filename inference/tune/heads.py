"""Loading of heads by name, for one draft."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.saved_head import head_policy
from accept_head.inference.policies.spec import DraftShape


def load_heads(names: Sequence[str], draft: PreTrainedModel) -> dict[str, AcceptanceHead]:
    """Heads by name. Raises InputError when one does not fit the draft or is named twice; warns when one was trained on
    another draft, as where text is decoded."""
    shape, heads = DraftShape.of(draft), {}
    for name in names:
        if name in heads:
            raise InputError(f"--head {name}: given twice")
        heads[name] = head_policy(name, shape, 0.5, {}).head
    return heads
