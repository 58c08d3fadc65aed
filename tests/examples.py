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
