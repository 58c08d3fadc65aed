"""Trace records for a batch of prompts, made directly: the content of `collect`'s shards, without files."""

from __future__ import annotations

from accept_head.training.collect.collector import record_of
from accept_head.training.collect.decoding import Decoding


def make_records(pair, prompts, config, draft_policy="none"):
    decoding = Decoding(pair, prompts, config, draft_policy)
    records = [record_of(prompt, columns, config) for prompt, columns in decoding.records(0, prompts)]
    return sorted(records, key=lambda record: record["index"])
