"""Rules in scalars, from their formulas, as references for several tests."""

from __future__ import annotations

import math

from accept_head.cost import BatchForwardCost, PairCosts


def pair_costs(draft, token=0.0, target=1.0, row=0.0, context=0.0):
    """Seconds of a draft step (and a row of it), of a token to verify, of a verification, and of a context token."""
    return PairCosts(
        draft=BatchForwardCost(alpha=context / 10, beta=row, gamma=draft, r_squared=1.0),
        target=BatchForwardCost(alpha=context, beta=token, gamma=target, r_squared=1.0),
    )


def product_rule(probabilities, threshold, most, *, k_min=1, lag=0):
    """SpecDec++ §4.2, one row: after how many tokens, at most `most`, 1 − Π P̂ of those judged is above the threshold.
    probabilities: of its tokens, the first on. lag: how many of the last drawn are not judged yet."""
    product = 1.0
    for length in range(1, most):
        if length > lag:
            product *= probabilities[length - lag - 1]
        if length >= k_min and 1 - product > threshold:
            return length
    return most


class ScalarAdaEdl:
    """One row of docs/theory.md §8."""

    def __init__(self, level, longest):
        self.level, self.rate, self.longest = level, 0.9, longest

    def drafts(self, shown, room):
        """The first token is drawn whatever its entropy is."""
        entropies = shown["entropy"][:room]
        declined = (n for n, entropy in enumerate(entropies) if n and 1 - math.sqrt(0.2 * entropy) < self.level)
        return next(declined, len(entropies))

    def verified(self, round):
        if round.drafted == 0:
            return
        self.rate = 0.5 * self.rate + 0.5 * round.accepted / round.drafted
        if self.rate < 0.9:
            wanted = self.level + 0.01
        elif round.accepted != self.longest:
            wanted = self.level - 0.01
        else:
            wanted = self.level
        self.level = 0.9 * self.level + 0.1 * wanted
