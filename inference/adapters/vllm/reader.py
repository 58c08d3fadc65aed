"""What a policy reads of the distribution that a token was drawn from, as vLLM hands it out: as q or as logits."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.inference.engine.compiled import Function, compiled
from accept_head.inference.policy import OF_Q, Signal
from accept_head.signals import draft_entropy, draft_logprob, draft_max_prob, signals_of_logits, signals_of_q

GREEDY_BELOW = 1e-5  # temperatures that vLLM takes for 0


class Distribution(NamedTuple):
    """The signals of a step, (batch,) each, and what a head makes of them, as DraftStep has them; None if not asked
    for."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    max_prob: Tensor | None = None
    scored: Tensor | None = None


class SignalReader:
    """needs: the policy's; what else it names is left to others."""

    def __init__(self, needs: frozenset[Signal]):
        self.needs = needs & OF_Q
        # (q, ids, hidden) and (logits, temperature, ids, hidden) → all signals, and what a head makes of them.
        self.of_q_at_once: Function | None = None
        self.of_logits_at_once: Function | None = None
        self.ones: dict[int, Tensor] = {}  # temperatures of greedy batches

    def compile(
        self,
        logits: Tensor,
        hidden: Tensor,
        *,
        sampled: bool,
        logger: logging.Logger,
        score: Function | None = None,
        signals: bool = True,
    ) -> bool:
        """Make one call of it, if that is quicker; whether it did. logits, hidden: like those to come, (batch, vocab)
        and (batch, hidden). sampled: q will be given, too. score: a head's, (hidden, signals, ids) → (batch,), of the
        state that a token is drawn from; what it says then comes with the signals, or alone without `signals`."""
        if not self.needs - {Signal.MAX_PROB}:
            return False  # one or two operations are as quick
        name = "the draft's signals" if score is None else "the head with the draft's signals"
        state = hidden if score is not None else None
        temperature, ids = logits.new_ones(len(logits), dtype=torch.float32), logits.argmax(-1)
        alone = score is not None and not signals

        def of_q(q: Tensor, ids: Tensor, hidden: Tensor | None) -> Tensor | tuple[Tensor, ...]:
            return _scored(score, signals_of_q(q, ids), ids, hidden, alone)

        def of_logits(
            logits: Tensor, temperature: Tensor, ids: Tensor, hidden: Tensor | None
        ) -> Tensor | tuple[Tensor, ...]:
            found = signals_of_logits(logits, _at_least_greedy(temperature), ids)
            return _scored(score, found, ids, hidden, alone)

        at_once = compiled(of_logits, (logits, temperature, ids, state), name=f"{name} (logits)", logger=logger)
        if at_once is of_logits:
            return False
        self.of_logits_at_once = at_once
        if sampled:
            example = (logits.softmax(-1, dtype=torch.float32), ids, state)
            self.of_q_at_once = compiled(of_q, example, name=f"{name} (q)", logger=logger)
        return True

    def of_q(self, q: Tensor, ids: Tensor, hidden: Tensor | None = None) -> Distribution:
        """q: (batch, vocab). ids: (batch,). hidden: (batch, hidden) that q came from."""
        if not self.needs:
            return Distribution()
        if self.of_q_at_once is not None:
            return self._found(self.of_q_at_once(q, ids.long(), hidden))
        needs = self.needs
        return Distribution(
            draft_logprob(q, ids.long()) if Signal.LOGPROB in needs else None,
            draft_entropy(q) if Signal.ENTROPY in needs else None,
            draft_max_prob(q) if Signal.MAX_PROB in needs else None,
        )

    def of_logits(
        self, logits: Tensor, temperature: Tensor | None, ids: Tensor, hidden: Tensor | None = None
    ) -> Distribution:
        """Of q at the temperature, and plain where that is 0. logits: (batch, vocab). temperature: (batch,); None = all
        greedy. ids: (batch,). hidden: (batch, hidden) that they came from."""
        if not self.needs:
            return Distribution()
        if self.of_logits_at_once is None:
            return self.of_q(draft_distribution(logits, temperature), ids, hidden)
        if temperature is None:
            temperature = self.ones.get(len(ids))
            if temperature is None:
                temperature = self.ones[len(ids)] = torch.ones(len(ids), device=ids.device)
        return self._found(self.of_logits_at_once(logits, temperature, ids.long(), hidden))

    def _found(self, results: Tensor | tuple[Tensor, ...]) -> Distribution:
        return Distribution(scored=results) if isinstance(results, Tensor) else Distribution(*results)


def _scored(
    score: Function | None,
    signals: tuple[Tensor, Tensor, Tensor],
    ids: Tensor,
    hidden: Tensor | None,
    alone: bool,
) -> Tensor | tuple[Tensor, ...]:
    if score is None:
        return signals
    said: Tensor = score(hidden, torch.stack(signals, dim=-1), ids)
    return said if alone else (*signals, said)


def draft_distribution(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """(batch, vocab) float32, as heads are trained on: at the sampling temperature, and plain where that is 0.

    temperature: (batch,); None = all greedy.
    """
    if temperature is None:
        return logits.softmax(-1, dtype=torch.float32)
    return (logits.float() / _at_least_greedy(temperature)[:, None]).softmax(-1)


def _at_least_greedy(temperature: Tensor) -> Tensor:
    return torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
