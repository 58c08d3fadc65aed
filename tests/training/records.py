"""Trace records for a batch of prompts, made directly: the content of `collect`'s shards, without files."""

from __future__ import annotations

from accept_head.training.collect.collector import score_responses
from accept_head.training.respond.transformers import TransformersResponder


def make_records(pair, batch, config):
    (answered,) = TransformersResponder(pair, config).batches(0, batch)
    return score_responses(pair, answered, config, drawn_with=config.sampling)
