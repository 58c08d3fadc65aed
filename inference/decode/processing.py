"""From logits to the distribution of the next token, in the same way for both models, at every slot of a ragged batch.

For losslessness a processor has to be a function of the prefix, so that it treats target and draft alike. The order is
that of transformers' `generate`: repetition penalty, processors, then temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from accept_head.errors import InputError
from accept_head.inference.decode.rows import Rows
from accept_head.inference.kernels.sampling import probabilities
from accept_head.inference.kernels.signals import PlainSoftmax, plain_softmax
from accept_head.sampling import Sampling

# Processors of transformers that depend on more than the prefix. Their scores would change when they are called again
# after a rejection, or for one row at a time.
TIED = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}


class Processing:
    """Sampling settings, a repetition penalty (1 = none) and any of transformers' logits processors."""

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        *,
        repetition_penalty: float = 1.0,
        logits_processor: Sequence[LogitsProcessor] = (),
    ):
        if not 0 < repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty is {repetition_penalty}, expected a positive number (1 = none)")
        for processor in logits_processor:
            if type(processor).__name__ in TIED:
                raise InputError(
                    f"{type(processor).__name__} keeps state, or is tied to a row's place in the batch: it is no "
                    "function of the prefix, which speculative decoding needs"
                )
        self.sampling, self.vocab_size = sampling, vocab_size
        self.repetition_penalty, self.processors = repetition_penalty, list(logits_processor)

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    @property
    def plain(self) -> bool:
        """Whether scores are the logits themselves, independent of the text before them."""
        return self.repetition_penalty == 1 and not self.processors

    def scores(self, logits: Tensor, rows: Rows, offset: int = 0) -> Tensor:
        """Logits after penalty and processors, before the sampling settings. logits: (batch, slots, ≥ vocab); slot j of
        a row follows its first lengths + offset + j tokens → (batch, slots, vocab)."""
        scores = logits[..., : self.vocab_size].to(rows.tokens.device)
        if self.repetition_penalty != 1:
            scores = self._penalise_repetition(scores.float(), rows, offset)
        if self.processors:
            scores = self._process(scores.float(), rows, offset)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        return probabilities(scores, self.sampling)

    def signal_probabilities(self, scores: Tensor, q: Tensor | None) -> Tensor | PlainSoftmax:
        """The distribution that draft signals are read from: q, or the plain softmax in greedy decoding."""
        return plain_softmax(scores) if q is None else self.sampling.signal_probabilities(scores, q)

    def _penalise_repetition(self, scores: Tensor, rows: Rows, offset: int) -> Tensor:
        """Penalise tokens that occur before a slot: divide their positive scores by the penalty, multiply negative
        ones."""
        used = rows.longest + offset + scores.shape[1] - 1
        tokens = rows.tokens[:, :used].clamp(max=self.vocab_size - 1)
        position = torch.arange(used, device=tokens.device).expand_as(tokens)
        first = torch.full((len(tokens), self.vocab_size), used, device=tokens.device)  # first position of each id
        first.scatter_reduce_(1, tokens, position, "amin")
        slot = torch.arange(scores.shape[1], device=tokens.device)
        seen = first[:, None] < (rows.lengths[:, None] + offset + slot)[..., None]  # (batch, slots, vocab)
        penalised = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        return torch.where(seen, penalised, scores)

    def _process(self, scores: Tensor, rows: Rows, offset: int) -> Tensor:
        # A processor takes a batch of prefixes of one length. The rows' lengths differ, so each row and slot needs a
        # call of its own.
        scores = scores.clone()
        for row in rows.live_rows:
            for slot in range(scores.shape[1]):
                context = rows.context(row, rows.host_lengths[row] + offset + slot)
                for processor in self.processors:
                    scores[row, slot] = processor(context[None], scores[row, slot][None])[0]
        return scores
