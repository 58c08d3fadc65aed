"""A drafter's files: the layout that vLLM, SpecForge and EAGLE's authors share, and that of speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, write_json

LAYERS = "eagle_aux_hidden_state_layer_ids"  # field of a config.json, or of its eagle_config
# Options of other drafters of this family, which change what is computed.
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")


def load_eagle3(folder: Path, target: PreTrainedModel | None, *, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Load a drafter for its target, whose input embeddings it shares if it has none of its own. target: None = for
    replay alone, which only needs to know of its embeddings, and only of its own.

    Raises InputError naming the file and the field or tensor that is missing, unknown or of another shape.
    """
    config = read_config(folder, target)
    drafter: Any = Eagle3Drafter(config)
    drafter.to(dtype or (torch.float32 if target is None else target.dtype))
    drafter.name_or_path = str(folder)
    expected = {name.removeprefix("model."): tensor for name, tensor in drafter.state_dict().items()}
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(path).items()}
    if target is not None:
        embeddings: Any = target.get_input_embeddings()
        found.setdefault("embed_tokens.weight", embeddings.weight.detach())
    elif "embed_tokens.weight" not in found:
        drafter.model.embed_tokens = None
        del expected["embed_tokens.weight"]
    if config.draft_vocab_size == config.vocab_size:  # then the checkpoint may lack the two maps
        found.setdefault("d2t", torch.zeros_like(drafter.d2t))
        found.setdefault("t2d", torch.ones_like(drafter.t2d))
    for name in sorted(expected.keys() ^ found.keys()):
        if name != "t2d":  # which follows from d2t
            raise InputError(f"{folder}: tensor {name!r} is {'missing' if name in expected else 'unknown'}")
    for name, tensor in expected.items():
        if name in found and found[name].shape != tensor.shape:
            raise InputError(
                f"{folder}: tensor {name!r} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            )
        if name in found:
            tensor.copy_(found[name])
    ids = drafter.drafted_ids
    if ids.amin() < 0 or ids.amax() >= config.vocab_size or (ids.diff() <= 0).any():
        raise InputError(f"{folder}: tensor 'd2t' does not map to ascending ids below {config.vocab_size}")
    drafter.set_vocabulary(ids)
    loaded: Eagle3Drafter = drafter.to("cpu" if target is None else target.device).eval().requires_grad_(False)
    return loaded


def read_config(folder: Path, target: PreTrainedModel | None) -> LlamaConfig:
    """The config.json of EAGLE's authors, SpecForge and vLLM, or of speculators → a LlamaConfig with all fields that
    are read here. Raises InputError naming a field that does not suit."""
    path = folder / "config.json"
    values = read_json(path)
    if isinstance(layer := values.pop("transformer_layer_config", None), dict):
        values = {**layer, **{name: value for name, value in values.items() if name != "speculators_config"}}
    for name in UNSUPPORTED:
        if values.get(name):
            raise InputError(f"{path}: field {name!r} is {values[name]!r}; such drafters are not supported")
    for name, expected in (("model_type", "llama"), ("num_hidden_layers", 1)):
        if values.get(name, expected) != expected:
            raise InputError(f"{path}: field {name!r} is {values[name]!r}, expected {expected!r}")
    eagle = values.get("eagle_config") or {}
    read = values.pop(LAYERS, None) or eagle.get(LAYERS)
    values["draft_vocab_size"] = values.get("draft_vocab_size") or values.get("vocab_size")
    if target is not None:
        text = target.config.get_text_config(decoder=True)
        layers, vocabulary = text.num_hidden_layers, target.get_output_embeddings().weight.shape[0]
        read = read or [2, layers // 2, layers - 3]  # vLLM's default
        if list(read) != sorted({*read} & {*range(layers)}):
            raise InputError(f"{path}: field {LAYERS!r} is {read}, expected ascending numbers, 0 to {layers - 1}")
        for name, expected in (("vocab_size", vocabulary), ("target_hidden_size", text.hidden_size)):
            if (values.get(name) or expected) != expected:
                raise InputError(f"{path}: field {name!r} is {values[name]}, but the target's is {expected}")
            values[name] = expected
    values["eagle_config"] = {**eagle, LAYERS: read or [0, 0, 0]}
    config = LlamaConfig(**values)
    config._attn_implementation = "sdpa"
    return config


def save_eagle3(drafter: Eagle3Drafter, folder: Path) -> None:
    """Write config.json and model.safetensors in the layout that vLLM reads, without the input embeddings: they are
    the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.removeprefix("model."): tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    del tensors["embed_tokens.weight"]
    with atomic_path(folder / "model.safetensors") as temporary:
        # save_file would make a file that only its owner may read.
        temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
    named = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        LAYERS: list(drafter.layers_read),  # vLLM's V2 model runner does not read them in eagle_config
    }
    write_json(folder / "config.json", drafter.config.to_diff_dict() | named)
