"""Shared parts of the tests of rules with a confidence or a cost model."""

from __future__ import annotations

import numpy as np

from accept_head.inference.replay.lossless import PROVED, Shape, enumerate_rounds
from tests.inference.support.references import pair_costs


def costs_of(draft=1e-3, token=2e-3, context=0.0):
    return pair_costs(draft, token, target=10e-3, row=draft / 20, context=context)


def drawn(max_q, q=None):
    """What policies are shown of tokens; as likely as the likeliest, if nothing else is said."""
    return {"max_prob": max_q, "logprob": np.log(max_q if q is None else q)}


def some_live(random, rows, share=0.8):
    live = random.random(rows) < share
    live[random.integers(rows)] = True
    return live


def graph_sized(tokens, stride):
    """The next of the sizes that a serving engine captures: powers of two up to the stride, then its multiples."""
    size = 1
    while size < tokens:
        size += size if size < stride else stride
    return size


# --- what one row emits in a round, exactly --------------------------------------------------------------------------

LIGHT, DEPTH = costs_of(draft=3e-4, token=2e-3), 3


def of_rounds(make):
    """Distributions are peaked, so that rows stop at, and are trimmed to, many lengths."""
    shape = Shape(vocab=3, depth=DEPTH, rows=2, history=1, concentration=0.15, agreement=0.3)
    return enumerate_rounds(make, pairs=25, shape=shape)


def is_exact(found):
    """… and the proof means something: rows are trimmed, and to several lengths."""
    trimmed = 1 - (found.submitted @ range(DEPTH + 1)) / (found.drafted @ range(DEPTH + 1))
    return found.ratio.max() < PROVED and trimmed > 0.05 and np.count_nonzero(found.submitted) > 2


def is_biased(found):
    return found.ratio.mean() > 1e-3
