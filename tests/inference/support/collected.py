"""Traces of any pair, made in this process in the same way as by `accept-head collect`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from accept_head import Pair, Sampling
from accept_head.pair import output_size
from accept_head.prompts import Prompt
from accept_head.trace.shards import write_shard
from tests.forwards import forward_with_hidden
from tests.inference.support.made_up import config_of
from tests.inference.support.toy import architectures, ragged_prompts
from tests.training.records import make_records

SAMPLED, GREEDY = Sampling(temperature=8.0, top_k=12), Sampling(temperature=0)


def collected(
    models,
    prompts,
    folder,
    *,
    sampling,
    max_new_tokens,
    ends=(),
    shard_size=4,
    batch_size=8,
    seed=0,
    domains=("",),
    fingerprint="draft",
):
    """What `accept-head collect` writes for these prompts, with these end tokens. models: (target, draft)."""
    target, draft = models
    vocab = min(output_size(target), output_size(draft))
    pair = Pair(target, draft, SimpleNamespace(pad_token_id=0, eos_token_id=None), vocab)
    options = {"shard_size": shard_size, "batch_size": batch_size, "seed": seed, "draft_fingerprint": fingerprint}
    sizes = {"max_new_tokens": max_new_tokens, "vocab_size": vocab, "end_token_ids": tuple(ends)}
    config = config_of(len(prompts), sampling=sampling, **sizes, **options)
    listed = [Prompt(i, str(i), domains[i % len(domains)], tuple(ids)) for i, ids in enumerate(prompts)]
    return written(folder, config, make_records(pair, listed, config))


def written(folder, config, records):
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder)
    for shard in range(config.num_shards):
        start = shard * config.shard_size
        write_shard(folder, shard, records[start : start + config.shard_rows(shard)])
    return folder


MODELS = architectures()
PROMPTS = ragged_prompts(10, longest=12)


def state_after(draft, ids):
    """(logits, hidden state) after these tokens, by an ordinary forward without a cache."""
    output = forward_with_hidden(draft, input_ids=torch.tensor([ids]), use_cache=False)
    return output.logits[0, -1], output.hidden[0, -1]
