"""Computes a policy's signals from the draft's distribution as its host has it: as q or as logits."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.head.scorer import Score, make_scorer
from accept_head.inference.engine.compiled import Function, compiled
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policy import OF_Q, DraftPolicy, Signal
from accept_head.sampling import likeliest
from accept_head.signals import (
    SIGNALS,
    draft_entropy,
    draft_logprob,
    draft_max_prob,
    signals_of_logits,
    signals_of_q,
)

GREEDY_BELOW = 1e-5  # temperatures that vLLM takes for 0


class Distribution(NamedTuple):
    """The signals of a step, (batch,) each, and the head's score of them, as in DraftStep; None if not needed."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    max_prob: Tensor | None = None
    scored: Tensor | None = None


class SignalReader:
    """Reads the signals of q that a policy needs. needs: of the policy; other signals are ignored."""

    def __init__(self, needs: frozenset[Signal]):
        self.needs = needs & OF_Q
        # Compiled: (q, places, ids, hidden) and (logits, temperature, places, ids, hidden) → all signals and the score.
        self.of_q_at_once: Function | None = None
        self.of_logits_at_once: Function | None = None
        self.ones: dict[int, Tensor] = {}  # temperatures of greedy batches

    def compile(
        self,
        logits: Tensor,
        hidden: Tensor,
        *,
        sampled: bool,
        logger: logging.Logger | None = None,
        score: Function | None = None,
        signals: bool = True,
    ) -> bool:
        """Compile the reading into one call if that is faster → whether it was compiled. logits, hidden: examples,
        (batch, vocab) and (batch, hidden). sampled: q will be given too. score: a head's, (hidden, signals, ids) →
        (batch,), of the state that a token is drawn from. The score then comes with the signals, or alone if not
        `signals`."""
        if not self.needs - {Signal.MAX_PROB}:
            return False  # one or two operations are as fast
        name = "the draft's signals" if score is None else "the head with the draft's signals"
        state = hidden if score is not None else None
        temperature = logits.new_ones(len(logits), dtype=torch.float32)
        alone = score is not None and not signals

        def of_q(q: Tensor, places: Tensor, ids: Tensor | None, hidden: Tensor | None) -> Tensor | tuple[Tensor, ...]:
            return _scored(score, signals_of_q(q, places), ids, hidden, alone)

        def of_logits(
            logits: Tensor, temperature: Tensor, places: Tensor, ids: Tensor | None, hidden: Tensor | None
        ) -> Tensor | tuple[Tensor, ...]:
            found = signals_of_logits(logits, _at_least_greedy(temperature), places)
            return _scored(score, found, ids, hidden, alone)

        places = likeliest(logits)
        of_token = places, places if score is not None else None, state
        at_once = compiled(of_logits, (logits, temperature, *of_token), name=f"{name} (logits)", logger=logger)
        if at_once is of_logits:
            return False
        self.of_logits_at_once = at_once
        if sampled:
            example = (logits.softmax(-1, dtype=torch.float32), *of_token)
            self.of_q_at_once = compiled(of_q, example, name=f"{name} (q)", logger=logger)
        return True

    def of_q(self, q: Tensor, places: Tensor, ids: Tensor | None = None, hidden: Tensor | None = None) -> Distribution:
        """Signals from q: (batch, vocab). places: (batch,), those of the tokens in q. ids, hidden: (batch,) the tokens
        and (batch, hidden) that q came from, which a score reads."""
        if not self.needs:
            return Distribution()
        if self.of_q_at_once is not None:
            return self._found(self.of_q_at_once(q, places.long(), ids, hidden))
        needs = self.needs
        return Distribution(
            draft_logprob(q, places.long()) if Signal.LOGPROB in needs else None,
            draft_entropy(q) if Signal.ENTROPY in needs else None,
            draft_max_prob(q) if Signal.MAX_PROB in needs else None,
        )

    def of_logits(
        self,
        logits: Tensor,
        temperature: Tensor | None,
        places: Tensor,
        ids: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Distribution:
        """Signals of the softmax at the temperature; at temperature 0, of the plain softmax. logits: (batch, vocab).
        temperature: (batch,); None = all greedy. places, ids, hidden: as of `of_q`."""
        if not self.needs:
            return Distribution()
        if self.of_logits_at_once is None:
            return self.of_q(draft_distribution(logits, temperature), places, ids, hidden)
        if temperature is None:
            temperature = self.ones.get(len(places))
            if temperature is None:
                temperature = self.ones[len(places)] = torch.ones(len(places), device=places.device)
        return self._found(self.of_logits_at_once(logits, temperature, places.long(), ids, hidden))

    def _found(self, results: Tensor | tuple[Tensor, ...]) -> Distribution:
        return Distribution(scored=results) if isinstance(results, Tensor) else Distribution(*results)


def _scored(
    score: Function | None,
    signals: tuple[Tensor, Tensor, Tensor],
    ids: Tensor | None,
    hidden: Tensor | None,
    alone: bool,
) -> Tensor | tuple[Tensor, ...]:
    if score is None:
        return signals
    result: Tensor = score(hidden, torch.stack(signals, dim=-1), ids)
    return result if alone else (*signals, result)


def compile_reading(
    reader: SignalReader,
    policy: DraftPolicy,
    logits: Tensor,
    hidden: Tensor,
    *,
    sampled: bool,
    logger: logging.Logger | None = None,
) -> bool:
    """Compile what is done for each drafted token, the head included → whether the reader was compiled. logits, hidden,
    sampled: as of `SignalReader.compile`."""
    while isinstance(policy, BatchStopPolicy):
        policy = policy.policy
    learns = isinstance(policy, RecalibratedHeadPolicy) and policy.training is not None  # its weights change
    if learns or not isinstance(policy, HeadPolicy):
        return reader.compile(logits, hidden, sampled=sampled, logger=logger)
    config, score = policy.head.config, _fusible(policy)
    at_once = score if config.reads == "before" and config.signals else None  # its inputs are known with the signals
    reads_more = type(policy).score is not HeadPolicy.score  # reads signals besides the score
    compiles = reader.compile(
        logits, hidden, sampled=sampled, logger=logger, score=at_once, signals=reads_more or at_once is None
    )
    if at_once is None or not compiles:
        ids = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        signals = logits.new_zeros(len(logits), len(SIGNALS), dtype=torch.float32) if config.signals else None
        example = (hidden, signals, ids if config.reads_embedding else None)
        made = compiled(score, example, name="the head", logger=logger)
        policy.probability = policy.probability if made is score else made
    return compiles


def _fusible(policy: HeadPolicy) -> Score:
    """The policy's `probability`, in a form that compiles well."""
    if type(policy) is not HeadPolicy or policy.head.device.type == "cuda":
        return policy.probability  # may be more than the head's score, or has its own kernels
    return make_scorer(policy.head, "both" if policy.statistic == "gain" else "token", fusible=True)


def draft_distribution(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """(batch, vocab) float32, as in training: the softmax at the sampling temperature; plain at temperature 0.

    temperature: (batch,); None = all greedy.
    """
    if temperature is None:
        return logits.softmax(-1, dtype=torch.float32)
    return (logits.float() / _at_least_greedy(temperature)[:, None]).softmax(-1)


def _at_least_greedy(temperature: Tensor) -> Tensor:
    return torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
