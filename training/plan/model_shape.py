"""A model's parameters, cache size and context from its config.json alone. No weights are read or made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accept_head.errors import InputError, one_line


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model.

    name: as given. parameters: exact number, tied weights counted once. cache_values: numbers in the KV cache per
    token. vocab_size: outputs. context: tokens. unreached: when a stand-in was read, why the name could not be
    resolved.
    """

    name: str
    parameters: int
    layers: int
    hidden_size: int
    cache_values: int
    vocab_size: int
    context: int
    unreached: str | None = None

    @classmethod
    def of(
        cls, name: str, option: str, *, model_shapes: str | None = None, trust_remote_code: bool = False
    ) -> ModelShape:
        """Read config.json of the folder or Hub name, else of `model_shapes`/NAME.

        Raises InputError naming the option when neither can be read.
        """
        from transformers import AutoConfig

        unreached = None
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # as in pair.load_model
            unreached = one_line(error)
            folder = Path(model_shapes) / name if model_shapes is not None else None
            if folder is None or not (folder / "config.json").is_file():
                instead = f", and {folder} has no config.json" if folder else "; --model_shapes names stand-ins"
                raise InputError(f"{option} {name}: its config cannot be read ({unreached}){instead}") from None
            config = AutoConfig.from_pretrained(folder)
        return cls._from_config(name, config, trust_remote_code, unreached)

    @classmethod
    def _from_config(cls, name: str, config: Any, trust_remote_code: bool, unreached: str | None) -> ModelShape:
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            model.tie_weights()
            text = config.get_text_config()
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        except Exception as error:  # for example, a config of a model that is no causal language model
            raise InputError(f"{name}: its config is of no causal language model ({error})") from None
        return cls(
            name=name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            cache_values=2 * text.num_hidden_layers * heads * size,
            vocab_size=text.vocab_size,
            context=int(getattr(text, "max_position_embeddings", None) or 1 << 30),
            unreached=unreached,
        )

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.parameters:,} parameters, {self.layers} layers, {self.hidden_size} channels, "
            f"{self.vocab_size:,} outputs, context {self.context:,}"
        )
