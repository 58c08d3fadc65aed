"""The sizes of both models as vLLM sees them, and how it drafts with the second, from their config.json alone."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoConfig

from accept_head.checkpoint import check_model, checkpoint_folder, reads_target
from accept_head.eagle3.saved import read_config
from accept_head.errors import InputError, one_line
from accept_head.inference.policies.spec import DraftShape


class Models(NamedTuple):
    shape: DraftShape
    context: int  # tokens that both models have positions for
    method: Literal["draft_model", "eagle3"] = "draft_model"  # vLLM's name for the kind of drafter


def read_models(target: str, draft: str, trust_remote_code: bool = False) -> Models:
    """Read both config.json. Raises InputError naming the option when one cannot be read, or when vLLM would refuse the
    pair: it requires vocabularies of equal size, padding included."""
    check_model(target, "--target")
    eagle3 = reads_target(draft)
    configs = [
        _read_config(target, "--target", trust_remote_code),
        read_config(checkpoint_folder(draft), None) if eagle3 else _read_config(draft, "--draft", trust_remote_code),
    ]
    sizes = [config.vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"vocab_size is {sizes[0]} in --target {target} and {sizes[1]} in --draft {draft}: vLLM takes a draft with "
            "the same only"
        )
    context = min(getattr(config, "max_position_embeddings", None) or 1 << 30 for config in configs)
    # For heads that read embeddings: here only the shape is needed.
    embeddings = torch.empty(sizes[1], configs[1].hidden_size, device="meta")
    shape = DraftShape(configs[1].hidden_size, torch.device("cpu"), embeddings)
    return Models(shape, context, "eagle3" if eagle3 else "draft_model")


def _read_config(name: str, option: str, trust_remote_code: bool) -> Any:
    """The config of the language model, also inside a larger model."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:  # a wrong name, a damaged file, a bad value: all raise different types
        reason = one_line(error)
        raise InputError(f"{option} {name}: its config.json cannot be read ({reason})") from None
    for field in ("vocab_size", "hidden_size"):
        if type(getattr(config, field, None)) is not int:
            raise InputError(f"{option} {name}: its config.json has no {field}, expected that of a language model")
    return config


def place_of(model: str) -> str:
    """The absolute path of a folder; a name on the Hub unchanged."""
    return os.path.abspath(model) if os.path.isdir(model) else model
