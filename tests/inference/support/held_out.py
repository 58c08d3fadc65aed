"""Coupled traces of held-out prompts, the decode loop on the same prompts, and a test of whether their rates differ."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.replay.coupled import load_coupled
from tests.inference.support.collected import collected
from tests.inference.support.toy import random_head

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(top_k=50)
NEWLINE, PERIOD = 203, 18  # frequent tokens of the embedded pair; as end tokens, many responses finish by themselves
Z_LIMIT, Z_95 = 3.89, 1.96
K_MAX = 12


@cache
def head(*, embedding=False, **config):
    """Untrained, with predictions from doubtful to sure, so that each threshold makes other rounds."""
    if embedding:  # any table will do: both sides look the tokens up in it
        config["embeddings"] = torch.randn(4096, 128, generator=torch.Generator().manual_seed(3))
    made = random_head(128, std=0.05, **config)
    torch.nn.init.constant_(made.output.bias if made.config.residual else made.base.bias, 1.5)
    return made


ROWS = 16  # decoded together


class Held:
    """Coupled traces of the first held-out prompts, and the decode loop on the same."""

    def __init__(self, pair, prompts, folder, sampling, ends, new_tokens):
        self.pair, self.sampling, self.ends, self.new_tokens = pair, sampling, ends, new_tokens
        self.prompts = prompts
        models = (pair.target, pair.draft)
        options = {"max_new_tokens": new_tokens, "ends": ends, "shard_size": 32, "batch_size": 32}
        collected(models, prompts, folder, sampling=sampling, **options)
        self.traces = load_coupled(folder, pair.draft, "draft", k_max=K_MAX)
        self.responses = [list(ids) for ids in self.traces.traces["response_ids"]]

    def decode(self, policy, seed=11):
        """→ counts (n, 4) as Replayed has them, and the responses."""
        result = generate(
            self.pair.target,
            self.pair.draft,
            self.prompts,
            policy=policy,
            sampling=self.sampling,
            max_new_tokens=self.new_tokens,
            batch_size=ROWS,
            end_token_ids=self.ends,
            seed=seed,
        )
        rows = [[s.generated, s.discarded, s.rounds, s.draft_forwards] for s in result.stats]
        return np.array(rows, dtype=float), result.tokens


def z_scores(one, other):
    """Of both rates; the standard error of a ratio of sums over prompts by the delta method."""
    scores = []
    for column in (1, 2):
        values, variances = [], []
        for counts in (one, other):
            n, rate = len(counts), counts[:, column].sum() / counts[:, 0].sum()
            off = counts[:, column] - rate * counts[:, 0]
            values.append(rate)
            variances.append((off**2).sum() * n / (n - 1) / counts[:, 0].sum() ** 2)
        difference, error = values[0] - values[1], math.sqrt(sum(variances))
        scores.append(difference / error if error else math.copysign(math.inf, difference) if difference else 0.0)
    return scores
