"""The decode loop: draft → verify → accept → rewind, for a batch of rows that each keep their own pace.

Losslessness: whatever a policy decides, each drawn token is verified, and every random number is used once (it belongs
to a row, a round and a slot). Tokens are counted per row; prompts are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.cost import DecodeCounts
from accept_head.errors import InputError
from accept_head.inference.cache import CachedModel
from accept_head.inference.policy import DraftPolicy, DraftStep, Signal, VerifyOutcome
from accept_head.inference.verify import Verified, verify
from accept_head.pair import Pair, context_tokens
from accept_head.randomness import uniforms
from accept_head.sampling import Sampling, draw
from accept_head.signals import draft_signals

DRAFT, ACCEPT, REDRAW = 0, 1, 2  # streams of random numbers


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One row's result. token_ids: new tokens, the end token included. The rest are counts over the row's rounds."""

    token_ids: list[int]
    drafted: int
    accepted: int
    rounds: int

    @property
    def counts(self) -> DecodeCounts:
        return DecodeCounts(
            generated=len(self.token_ids),
            discarded=self.drafted - self.accepted,
            target_forwards=self.rounds,
            draft_forwards=self.drafted,
        )


class Drafted(NamedTuple):
    """ids: (batch, k); probabilities: (batch, k, vocab); lengths: (batch,), how many of them are each row's."""

    ids: Tensor
    probabilities: Tensor
    lengths: Tensor


@torch.no_grad()
def generate(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    policy: DraftPolicy,
    sampling: Sampling,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts (token ids) speculatively; the output is distributed as the target's own.

    end_ids: tokens that end a row. row_ids: a number per row, mixed with `seed`: a row's random numbers depend on these
    two alone, not on the batch around it. Raises InputError when a row cannot fit the models' context.
    """
    rows = Rows(pair, prompts, max_new_tokens, policy, row_ids)
    while rows.live.any():  # the sync that ends a round
        drafted = _draft(rows, pair, policy, sampling, seed)
        verified = _verify(rows, pair, drafted, sampling, seed)
        outcome = rows.accept(drafted, verified, end_ids)
        policy.observe(outcome)
    return rows.results()


class Rows:
    """The batch: tokens so far, each row's length, and how much of a row the draft has been fed.

    Between rounds the target has been fed all tokens of a row but the last, the draft `draft_fed` of them.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        policy: DraftPolicy,
        row_ids: Sequence[int] | None,
    ):
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected a positive integer")
        if not prompts or not all(prompts):
            raise InputError("there is an empty prompt: each needs at least one token")
        device = pair.target.device
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.prompt_lengths = self.lengths.clone()
        self.max_lengths = self.lengths + max_new_tokens
        longest = int(self.max_lengths.max())
        if longest > (room := min(context_tokens(pair.target), context_tokens(pair.draft))):
            raise InputError(f"prompt and response need {longest} tokens, but the models' context has {room}")
        # One spare column: where the scatter of a shorter row's missing tokens goes.
        self.tokens = torch.zeros(len(prompts), longest + 1, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.live = torch.ones_like(self.lengths, dtype=torch.bool)
        self.ids = torch.tensor(row_ids if row_ids is not None else range(len(prompts)), device=device)
        self.rounds, self.drafted, self.accepted = (torch.zeros_like(self.lengths) for _ in range(3))
        self.target = CachedModel(pair.target, longest)
        self.draft = CachedModel(pair.draft, longest)
        self.target.prefill(self.tokens, self.lengths - 1)
        self.draft_fed = torch.zeros_like(self.lengths)
        if policy.max_draft_tokens > 0:
            self.draft.prefill(self.tokens, self.lengths - 1)
            self.draft_fed = self.lengths - 1

    def slice(self, starts: Tensor, width: int) -> Tensor:
        """Tokens (batch, width) of each row from its own start; what lies beyond a row's length is arbitrary."""
        index = starts[:, None] + torch.arange(width, device=starts.device)
        return self.tokens.gather(1, index.clamp(max=self.tokens.shape[1] - 1))

    def accept(self, drafted: Drafted, verified: Verified, end_ids: Sequence[int]) -> VerifyOutcome:
        """Append the accepted tokens and the next one, cut after an end token; set back what the draft has been fed."""
        width = drafted.ids.shape[1] + 1
        slot = torch.arange(width, device=self.lengths.device)
        ids = torch.cat([drafted.ids, verified.next_ids[:, None]], dim=1)
        ids = torch.where(slot == verified.accepted[:, None], verified.next_ids[:, None], ids)  # (batch, width)
        emitted = (verified.accepted + 1) * self.live
        if end_ids:
            is_end = torch.isin(ids, torch.tensor(end_ids, device=ids.device)) & (slot < emitted[:, None])
            ended = is_end.any(-1)
            emitted = torch.where(ended, is_end.int().argmax(-1) + 1, emitted)
        else:
            ended = torch.zeros_like(self.live)
        kept = slot < emitted[:, None]
        place = torch.where(kept, self.lengths[:, None] + slot, self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, place, ids)

        count = drafted.lengths * self.live
        accepted = torch.minimum(verified.accepted, emitted) * self.live
        fed = self.lengths + torch.minimum(verified.accepted, count - 1)  # the last drafted token was not fed
        self.draft_fed = torch.where(count > 0, fed, self.draft_fed)
        self.lengths = self.lengths + emitted
        self.rounds += self.live
        self.drafted += count
        self.accepted += accepted
        outcome = VerifyOutcome(drafted=count, accepted=accepted, live=self.live)
        self.live = self.live & ~ended & (self.lengths < self.max_lengths)
        return outcome

    def results(self) -> list[Generation]:
        columns = [self.prompt_lengths, self.lengths, self.drafted, self.accepted, self.rounds]
        table = torch.stack(columns, dim=-1).tolist()
        tokens = self.tokens.tolist()
        return [
            Generation(token_ids=row[start:end], drafted=drafted, accepted=accepted, rounds=rounds)
            for row, (start, end, drafted, accepted, rounds) in zip(tokens, table, strict=True)
        ]


def _draft(rows: Rows, pair: Pair, policy: DraftPolicy, sampling: Sampling, seed: int) -> Drafted:
    """Let each live row draft until its policy or its budget says stop.

    Two host syncs a token remain: may the loop end (here), and how many slots are in use (in the cache).
    """
    # A round emits one token more than it accepts: the last token of a response needs no draft.
    budget = torch.minimum(policy.start_round(rows.live), rows.max_lengths - rows.lengths - 1) * rows.live
    count = torch.zeros_like(rows.lengths)
    active = budget > 0
    ids: list[Tensor] = []
    probabilities: list[Tensor] = []
    signals: Tensor | None = None
    if not active.any():
        empty = rows.tokens[:, :0]
        return Drafted(empty, torch.empty(*empty.shape, pair.vocab_size, device=empty.device), count)
    # First feed what the draft has not seen: the last token, and any accepted one that it drew but was not fed.
    width = int((rows.lengths - rows.draft_fed).max())
    output = rows.draft.forward(rows.slice(rows.draft_fed, width), rows.draft_fed)
    last = (rows.lengths - rows.draft_fed - 1)[:, None, None].clamp(min=0)
    logits = output.logits.gather(1, last.expand(-1, 1, output.logits.shape[-1]))[:, 0]  # (batch, vocab)
    hidden = output.hidden.gather(1, last.expand(-1, 1, output.hidden.shape[-1]))[:, 0]  # (batch, hidden)
    while True:
        depth = len(ids) + 1
        q = sampling.probabilities(logits[:, : pair.vocab_size])
        ids.append(draw(q, uniforms(seed, rows.ids, rows.rounds, depth, DRAFT)))
        probabilities.append(q)
        count = count + active
        fed_signals = signals
        if Signal.DRAFT_SIGNALS in policy.needs:
            signals = draft_signals(sampling.signal_probabilities(logits[:, : pair.vocab_size], q), ids[-1])
        step = DraftStep(
            depth=depth,
            token_ids=ids[-1],
            active=active,
            fed_hidden=hidden if Signal.HIDDEN in policy.needs else None,
            fed_signals=fed_signals,
            signals=signals,
        )
        active = active & (count < budget) & policy.keep_drafting(step)
        if not active.any():
            break
        output = rows.draft.forward(ids[-1][:, None], rows.lengths + depth - 1)
        logits, hidden = output.logits[:, -1], output.hidden[:, -1]
    return Drafted(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1), count)


def _verify(rows: Rows, pair: Pair, drafted: Drafted, sampling: Sampling, seed: int) -> Verified:
    """One target forward on the last token and the draft, then the ratio test."""
    last = rows.slice(rows.lengths - 1, 1)
    logits = rows.target.forward(torch.cat([last, drafted.ids], dim=1), rows.lengths - 1).logits
    p = sampling.probabilities(logits[..., : pair.vocab_size])  # (batch, k + 1, vocab)
    slots = torch.arange(drafted.ids.shape[1], device=p.device)
    accept_uniform = uniforms(seed, rows.ids[:, None], rows.rounds[:, None], slots, ACCEPT)
    redraw_uniform = uniforms(seed, rows.ids, rows.rounds, 0, REDRAW)
    return verify(p, drafted.probabilities, drafted.ids, drafted.lengths, accept_uniform, redraw_uniform)
