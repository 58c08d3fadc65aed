"""A draft/target pair: loading it, checking that both sides have the same vocabulary, and reading hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accept_head.checkpoint import check_model, checkpoint_folder, reads_target
from accept_head.errors import InputError, one_line
from accept_head.files import sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer, ready for inference (eval mode, no gradients)."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int  # number of ids that both models score; outputs beyond are padding of the embedding matrix


def load_pair(
    target: str | Path,
    draft: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    device_map: str | None = None,
    max_memory: dict[str, str] | None = None,
    offload_folder: str | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Load both models and check that their tokenizers map the same tokens to the same ids.

    target, draft: local folders or Hub names; the draft may be an EAGLE-3 drafter. dtype: `float32`, `bfloat16`,
    `float16`, or `auto`: the stored dtype on an accelerator, float32 on a CPU. device: for both models; default: the
    first GPU, or the CPU. device_map: for a target that is larger than a device; the draft does not get it. max_memory
    (with device_map): how much of the target each device may hold, like {"0": "60GiB", "cpu": "200GiB"}. offload_folder
    (with device_map): for weights that fit on no device.

    Raises InputError naming the option when a model cannot be loaded or the vocabularies differ.
    """
    target_tokenizer = load_tokenizer(target, "--target", trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    spread: dict[str, Any] = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    if reads_target(draft):
        from accept_head.eagle3.saved import load_eagle3

        target_model = load_model(target, "--target", device=device, **spread, **options)
        drafter = load_eagle3(checkpoint_folder(draft), target_model)
        return Pair(target_model, drafter, target_tokenizer, output_size(target_model))
    draft_tokenizer = load_tokenizer(draft, "--draft", trust_remote_code)
    check_same_vocabulary(target_tokenizer, draft_tokenizer)
    target_model = load_model(target, "--target", device=device, **spread, **options)
    draft_model = load_model(draft, "--draft", device=device, **options)
    vocab_size = min(output_size(target_model), output_size(draft_model))
    if vocab_size <= max(target_tokenizer.get_vocab().values()):
        raise InputError(
            f"the tokenizer has {len(target_tokenizer)} tokens, but --target scores {output_size(target_model)} ids "
            f"and --draft {output_size(draft_model)}: both must score every token"
        )
    return Pair(target_model, draft_model, target_tokenizer, vocab_size)


def load_model(
    name: str | Path,
    option: str,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    device_map: str | None = None,
    max_memory: dict[str, str] | None = None,
    offload_folder: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load one causal language model for inference. Raises InputError naming `option` when that fails."""
    from transformers import AutoModelForCausalLM

    check_model(name, option)
    place = torch.device(device) if device else default_device()
    resolved = _resolve_dtype(dtype, place)
    spread = _spread(device_map, max_memory, offload_folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=resolved,
            **spread,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # a wrong name, a damaged file, a bad config value: each library raises its own errors
        raise InputError(f"{option} {name}: cannot be loaded as a causal language model ({one_line(error)})") from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would continue with random numbers in its place.
        raise InputError(f"{option} {name}: tensor {missing[0]!r} is missing from the checkpoint")
    if device_map is None:
        model.to(place)
    if place.type == "cpu" and model.dtype != torch.float32:
        # For the last of several positions transformers passes a view. On a CPU, torch's half-precision products with a
        # view take a thousand times as long as with a copy.
        model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: (inputs[0].contiguous(),))
    return model.eval().requires_grad_(False)


def _spread(device_map: str | None, max_memory: dict[str, str] | None, offload_folder: str | None) -> dict[str, Any]:
    """Options of `from_pretrained` for a model spread over several devices."""
    for option, value in (("max_memory", max_memory), ("offload_folder", offload_folder)):
        if value is not None and device_map is None:
            raise InputError(
                f"--{option} is given without --device_map; with `--device_map auto` it bounds each device"
            )
    options: dict[str, Any] = {"device_map": device_map}
    if max_memory is not None:
        options["max_memory"] = {int(name) if name.isdigit() else name: most for name, most in max_memory.items()}
    return options | ({"offload_folder": offload_folder} if offload_folder is not None else {})


def hub_revision(name: str | Path) -> str | None:
    """The commit of a Hub name in the local cache, where loading the model has put it. None for a folder."""
    from huggingface_hub import try_to_load_from_cache

    config = None if Path(name).is_dir() else try_to_load_from_cache(str(name), "config.json")
    return Path(config).parent.name if isinstance(config, str) else None  # …/snapshots/COMMIT/config.json


def load_tokenizer(name: str | Path, option: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left. Raises InputError naming `option` when that fails."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, padding_side="left")
    except Exception as error:  # as above
        raise InputError(f"{option} {name}: its tokenizer cannot be loaded ({one_line(error)})") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Compare token → id on both sides. Raises InputError naming the first token that differs.

    Comparing sizes is not enough: two vocabularies of the same size can number their tokens differently.
    """
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if target_ids == draft_ids:
        return
    token = min(t for t in target_ids.keys() | draft_ids.keys() if target_ids.get(t) != draft_ids.get(t))
    raise InputError(
        f"--target and --draft have different vocabularies: token {token!r} is id {target_ids.get(token)} for the "
        f"target and id {draft_ids.get(token)} for the draft; a draft must share its target's tokenizer"
    )


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the token → id map."""
    return sha256("\n".join(f"{token}\t{index}" for token, index in sorted(tokenizer.get_vocab().items())))


class Forward(NamedTuple):
    logits: Tensor  # (batch, seq, vocab)
    hidden: Tensor  # (batch, seq, hidden), after the final norm
    own: Tensor | None = None  # (batch, seq, hidden), before it; of a drafter that goes on from its own states


def base_model(model: PreTrainedModel) -> torch.nn.Module:
    """The transformer without its language-model head; its first output is the hidden state after the final norm."""
    base = model.get_decoder()  # the part that the forward pass calls; in OPT not the whole base model
    if base is None or base is model:
        raise InputError(f"{type(model).__name__} has no base model to read hidden states from")
    return base


def output_size(model: PreTrainedModel) -> int:
    """Number of ids that the model scores, padding of the embedding matrix included."""
    own: int | None = getattr(model, "output_size", None)  # of a drafter whose output layer has fewer
    return own if own is not None else model.get_output_embeddings().weight.shape[0]


def hidden_size(model: PreTrainedModel) -> int:
    """Channels of the last hidden state."""
    return model.get_output_embeddings().weight.shape[1]


def input_embeddings(model: PreTrainedModel) -> Tensor:
    """(vocab, channels): the input embedding matrix, without the scaling that some models apply."""
    return model.get_input_embeddings().weight.detach()  # type: ignore[operator]


def load_draft(
    name: str | Path,
    option: str,
    *,
    dtype: str = "auto",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A draft model, or an EAGLE-3 drafter without its target, for what its traces tell. Raises InputError
    as `load_model` does."""
    if not reads_target(name):
        return load_model(name, option, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    from accept_head.eagle3.saved import load_eagle3

    resolved = _resolve_dtype(dtype, torch.device("cpu"))
    own = resolved if isinstance(resolved, torch.dtype) else None
    drafter: Any = load_eagle3(checkpoint_folder(name), None, dtype=own)
    return drafter.to(device or "cpu")


def end_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Every id that ends a response: the generation config's, else the tokenizer's, else none."""
    ends = target.generation_config.eos_token_id if target.generation_config is not None else None
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs and logits.

    Offloaded parts (device `meta`) do not count: accelerate computes them elsewhere and moves their inputs.
    """
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def context_tokens(model: PreTrainedModel) -> int:
    """The longest sequence that the model has positions for, in tokens."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"dtype is {dtype!r}, expected auto, float32, bfloat16 or float16")
    return getattr(torch, dtype)


def attention_mask_for(model: PreTrainedModel, allowed: Tensor) -> Tensor:
    """A 4-D mask in the form that this model's attention takes. allowed: (batch, 1, query, key) bool.

    Raises InputError for attention implementations that do not take an explicit mask.
    """
    implementation = model.config._attn_implementation
    if implementation == "sdpa":
        return allowed
    if implementation == "eager":
        return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(model.dtype).min
        )
    raise InputError(
        f"attention implementation is {implementation!r}, expected 'sdpa' or 'eager': it takes no 4-D mask"
    )
