"""Alternatives at the positions of coupled traces, for the replay of policies that learn from them.

Traces keep what was drawn, not what it was drawn from: one teacher-forced pass of both models over each response.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability
from accept_head.alternatives import DRAWS, Alternatives, draw_alternatives
from accept_head.errors import InputError
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.randomness import TraceStream, uniforms

FAR = 0.02  # rounding in another dtype moves a(Y) by less, on average


@torch.no_grad()
def alternatives_of(traces: CoupledTraces, target: PreTrainedModel, draft: PreTrainedModel) -> Alternatives:
    """(P, DRAWS) of all positions, in their order, on the CPU. target, draft: the pair that made the traces.

    Raises InputError for greedy traces, where one token is accepted and no other can be drawn, and when the pair gives
    other a(Y) than the traces hold.
    """
    config = traces.config
    if config.sampling.greedy:
        raise InputError(f"the traces of {config.num_prompts} prompts are greedy, expected sampled ones")

    def distributions(model: PreTrainedModel, ids: Tensor, positions: slice) -> Tensor:
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, positions]
        return config.sampling.probabilities(logits[..., : config.vocab_size]).cpu()

    parts, apart = [], []
    for record in traces.traces.with_format("numpy"):
        ids = torch.from_numpy(np.concatenate([record["prompt_ids"], record["response_ids"]])).long()
        before = slice(len(record["prompt_ids"]) - 1, len(ids) - 1)  # whose logits the response was drawn from
        steps = torch.arange(len(record["response_ids"]))[:, None]
        random = uniforms(config.seed, int(record["index"]), steps, TraceStream.LATER_ALTERNATIVES, torch.arange(DRAWS))
        p, q = (distributions(model, ids, before) for model in (target, draft))
        parts.append(draw_alternatives(p, q, random))
        known = acceptance_probability(p, q, torch.from_numpy(record["draft_ids"]).long())
        apart.append((known - torch.from_numpy(record["acceptance"])).abs())
    if (mean := float(torch.cat(apart).mean())) > FAR:
        raise InputError(f"these models give a(Y) {mean:.2f} away from the traces' on average: not the pair of theirs")
    return Alternatives(*map(torch.cat, zip(*parts, strict=True)))
