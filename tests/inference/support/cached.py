"""Texts that are fed to every kind of model piece by piece."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from accept_head.inference.engine.cache import CachedModel
from tests.inference.support.toy import GROUPED, VOCAB, architectures, tiny

LENGTH = 20
MODELS = {name: target for name, (target, _) in architectures().items()} | {
    "mistral window": tiny(MistralForCausalLM, MistralConfig, layers=2, sliding_window=5, **GROUPED),
    "gemma3 window": tiny(
        Gemma3ForCausalLM, Gemma3TextConfig, layers=2, sliding_window=5, sliding_window_pattern=2, **GROUPED
    ),
}


def random_ids(rows, width, seed=0):
    return torch.randint(0, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def at(tensor, starts, width):
    """tensor[row, start : start + width] of each row."""
    index = starts[:, None] + torch.arange(width)
    return tensor[torch.arange(len(starts))[:, None], index]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


WINDOW = 5


@torch.no_grad()
def ragged_logits(model, attention, **options):
    """Logits of prompts that are filled in pieces and in another order, and of ragged forwards after rollbacks."""
    ids, logits = random_ids(4, LENGTH).to(model.device), []
    cached = CachedModel(model, 4, LENGTH, with_hidden=True, attention=attention, **options)
    cached.fill(ids, [0, 2, 3, 1], [0, 0, 0, 0], [2, 5, 9, 4])
    cached.fill(ids, [3, 0], [9, 2], [12, 3])
    starts = torch.tensor([3, 4, 5, 12])
    for seed, width in enumerate((3, 1, 4), start=1):
        longest, here = int(starts.max()), starts.to(model.device)
        fed = at(ids.cpu(), starts, width).to(model.device)
        cached.forward(random_ids(4, width, seed).to(model.device), here, longest)  # rejected: fed, then written over
        output = cached.forward(fed, here, longest)
        logits += [output.logits, output.hidden]
        starts = starts + width - torch.tensor([0, 1, 0, 1]) * (width > 1)
    return logits
