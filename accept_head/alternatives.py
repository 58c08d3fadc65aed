"""What else the draft might have drawn at a verified position, and how that would have fared.

The ratio test holds p and q against each other for one token, but it has all of both: a(y) of any y is known. Some more
draws Y' ∼ q, with their a(Y'), tell what a head would else need more text for: how acceptance depends on the token,
from the state that all of them were drawn from. `collect` writes them beside the drawn token, and a head that learns
while it serves is told them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from accept_head.acceptance import acceptance_probability
from accept_head.sampling import draw_several

DRAWS = 4  # a position: with 8 heads hardly learn more


class Alternatives(NamedTuple):
    """(..., draws) each: ids of Y' ∼ q, log q(Y') and a(Y') = min(1, p(Y')/q(Y')), at each of (...) positions."""

    token_ids: Tensor
    logprob: Tensor
    acceptance: Tensor

    def at(self, places: Tensor) -> Alternatives:
        """Of these positions, (...) → (..., draws); of a table with the shape (positions, draws)."""
        return Alternatives(*[part[places] for part in self])


def draw_alternatives(p: Tensor, q: Tensor, uniforms: Tensor) -> Alternatives:
    """p, q: (..., vocab), after sampling processing. uniforms: (..., draws) in [0, 1)."""
    ids = draw_several(q, uniforms)
    several_p, several_q = (each.unsqueeze(-2).expand(*ids.shape, each.shape[-1]) for each in (p, q))
    return Alternatives(ids, q.gather(-1, ids).log(), acceptance_probability(several_p, several_q, ids))
