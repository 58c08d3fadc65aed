"""Alternatives: other tokens that the draft might have drawn at a verified position, with their acceptance.

The acceptance test compares p and q for one token, but both are known for all tokens, so a(y) of any y is known.
Further draws Y' ∼ q with their a(Y') show how acceptance depends on the token that is drawn from a state. Without them
a head needs more text to learn this. `collect` writes them beside the drawn token. A head that learns while it serves
also gets them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from accept_head.acceptance import acceptance_probability
from accept_head.sampling import draw_several

DRAWS = 4  # per position; heads hardly learn more from 8


class Alternatives(NamedTuple):
    """(..., draws) each: ids of Y' ∼ q, log q(Y') and a(Y') = min(1, p(Y')/q(Y')), at each of (...) positions."""

    token_ids: Tensor
    logprob: Tensor
    acceptance: Tensor

    def at(self, places: Tensor) -> Alternatives:
        """The alternatives at these places, (...) → (..., draws), of a table with shape (positions, draws)."""
        return Alternatives(*[part[places] for part in self])


def draw_alternatives(p: Tensor, q: Tensor, uniforms: Tensor) -> Alternatives:
    """Draw alternatives. p, q: (..., vocab), after sampling processing. uniforms: (..., draws) in [0, 1)."""
    ids = draw_several(q, uniforms)
    several_p, several_q = (each.unsqueeze(-2).expand(*ids.shape, each.shape[-1]) for each in (p, q))
    return Alternatives(ids, q.gather(-1, ids).log(), acceptance_probability(several_p, several_q, ids))
