"""Policies that stop at several depths, and the distance of the loop's output from the target's distribution."""

from __future__ import annotations

from accept_head import Sampling
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.policies.svip import SvipPolicy
from tests.inference.support.enumeration import (
    emitted_distribution,
    random_head_policy,
    target_distribution,
    total_variation,
    uncertain_pair,
)

BIASED = 1e-3
SEED = 24  # of a pair on which all policies that can stop early do, at several depths
ALL_TOKENS, TWO_TOKENS = Sampling(top_k=0), Sampling(top_k=2)
SAMPLINGS = {
    "T=1": ALL_TOKENS,
    "T=.7 k=3": Sampling(temperature=0.7, top_k=3),
    "k=2": TWO_TOKENS,
    "p=.8": Sampling(top_k=0, top_p=0.8),
}
ONE, THREE = [[1, 2]], [[1], [1, 2], [0, 2, 0]]
HEADS = {
    "head drawn, lag 0": lambda: random_head_policy(lag=0),
    "head drawn, lag 1": lambda: random_head_policy(lag=1),
    "head before": lambda: random_head_policy(reads="before"),
}
POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed:1": lambda: FixedPolicy(1),
    "fixed:2": lambda: FixedPolicy(2),
    "fixed:3": lambda: FixedPolicy(3),
    **HEADS,
    "confidence": lambda: ConfidencePolicy(0.35),
    "cumulative-confidence": lambda: CumulativeConfidencePolicy(0.2),
    "max-prob": lambda: MaxProbPolicy(0.45),
    "svip": lambda: SvipPolicy(0.38),
    "adaedl": lambda: AdaEdlPolicy(0.56),
}


def distance(policy, prompts=ONE, sampling=ALL_TOKENS, length=3, row=0, *, seed=SEED, vocab=3, rules=None, **options):
    """Total variation between what the loop emits for one row and the target's own distribution.

    rules: what applies to both, end tokens and a repetition penalty.
    """
    target, draft = uncertain_pair(seed, vocab)
    rules = rules or {}
    emitted = emitted_distribution(target, draft, prompts, policy, sampling, length, row, **rules, **options)
    tokens = length if isinstance(length, int) else length[row]
    return total_variation(emitted, target_distribution(target, prompts[row], sampling, tokens, **rules))


def together(policy, length=4, **options):
    """The same with all known leaves as rows of one batch, as a policy that looks at each row alone allows."""
    return distance(policy, length=length, leaves_together=True, **options)


def drafted_lengths(seen):
    """A watcher that counts how many tokens rows submitted in their first rounds."""
    return lambda round_: seen.update(round_.drafted.submitted[round_.rows.rounds == 1].tolist())
