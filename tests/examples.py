"""A config of traces, the quality of a head, and folders of traces that are written without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accept_head.sampling import Sampling
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import write_shard

TRACES = TraceConfig(
    target="some/target",
    target_fingerprint="a1",
    draft="some/draft",
    draft_fingerprint="b2",
    vocabulary_fingerprint="c3",
    vocab_size=64,
    end_token_ids=(2,),
    prompts_fingerprint="d4",
    num_prompts=5,
    sampling=Sampling(temperature=0.7, top_k=20, top_p=0.9),
    max_new_tokens=16,
    seed=3,
    batch_size=2,
    shard_size=2,
)
QUALITY = {
    "count": 1234,
    "binary_kl": 0.1111,
    "constant_kl": 0.2222,
    "brier": 0.0333,
    "ece": 0.0444,
    "auroc": 0.8555,
    "mean_predicted": 0.61,
    "mean_observed": 0.62,
}


def write_traces(folder: Path, config: TraceConfig, records: Sequence[dict[str, Any]]) -> Path:
    """A folder with these records, one for each prompt of the config."""
    folder.mkdir(exist_ok=True)
    config.save(folder)
    for shard in range(config.num_shards):
        first = shard * config.shard_size
        write_shard(folder, shard, records[first : first + config.shard_rows(shard)])
    return folder


def make_eagle3(target: Any, *, seed: int = 0, draft_vocabulary: int = 120, layers: tuple[int, ...] = (1, 2, 3)) -> Any:
    """An untrained EAGLE-3 drafter of a small Llama target."""
    import torch
    from transformers import LlamaConfig

    from accept_head.eagle3.network import Eagle3Drafter

    wide = target.config
    config = LlamaConfig(
        vocab_size=wide.vocab_size,
        draft_vocab_size=draft_vocabulary,
        hidden_size=wide.hidden_size,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=wide.max_position_embeddings,
        initializer_range=0.3,
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(layers)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config).eval().requires_grad_(False)
        drafter.set_vocabulary(torch.randperm(wide.vocab_size)[:draft_vocabulary].sort().values)
    drafter.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    return drafter


def generation_kwargs(sampling: Sampling) -> dict[str, Any]:
    """The settings as transformers' `generate` takes them."""
    if sampling.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    return {"do_sample": True, **sampling.to_dict(), "min_p": sampling.min_p or None}
