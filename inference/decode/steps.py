"""The steps of a round between its forwards: functions of tensors without a sync, so that graphs can capture them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from accept_head.alternatives import DRAWS, Alternatives, draw_alternatives
from accept_head.eagle3.network import Eagle3Drafter
from accept_head.inference.decode.drafted import Drafted, Drawn
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Rows
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.kernels.sampling import draw
from accept_head.inference.kernels.signals import PlainSoftmax, signals_of
from accept_head.inference.kernels.verify import Verified, by_match, by_ratio
from accept_head.inference.policies.drafting import Drafting, DraftProgress
from accept_head.inference.policies.reader import SignalReader
from accept_head.inference.policy import OF_Q, DraftStep, Signal, Verifier
from accept_head.pair import Forward
from accept_head.randomness import DecodeStream, uniforms
from accept_head.sampling import likeliest


class Steps:
    """The steps of one run."""

    def __init__(
        self,
        rows: Rows,
        drafting: Drafting,
        processing: Processing,
        stopping: Stopping,
        drafter: Eagle3Drafter | None,
        *,
        seed: int,
        verifier: Verifier,
        reader: SignalReader | None = None,
    ):
        """drafter: one that lacks tokens. q, the draw and the signals are then of its tokens alone, unless a
        processor has to see all. reader: reads the signals for a policy that is asked after each token, in place of
        `step_of`."""
        self.rows, self.drafting, self.processing, self.stopping = rows, drafting, processing, stopping
        self.seed, self.verifier = seed, verifier
        self.drafter, self.narrow = drafter, drafter if processing.plain else None
        self.reader = None if drafting.peeks else reader

    def set_uniforms(self, slots: int) -> None:
        """Set this round's random numbers, `slots` for each purpose of each row."""
        self.rows.set_uniforms(self.seed, slots)

    def begin(self) -> DraftProgress:
        """Ask what each row may draft. A round emits one token more than it accepts, so the last token of a response
        needs no draft."""
        rows = self.rows
        return self.drafting.begin(rows.live.clone(), torch.minimum(rows.max_lengths - rows.lengths - 1, rows.k_max))

    def draw(
        self, depth: int, fed: Forward, progress: DraftProgress, needs: frozenset[Signal], asks: bool
    ) -> tuple[Drawn, DraftProgress]:
        """Draw the token at `depth` of every row; tokens of rows that have stopped do not count. needs: the signals
        that the policy reads. asks: whether the policy is asked afterwards."""
        rows, processing = self.rows, self.processing
        scores = processing.scores(self._draft_logits(fed), rows, depth - 1)[:, 0]  # (batch, vocab)
        q = None if processing.greedy else processing.probabilities(scores)
        signal_q = processing.signal_probabilities(scores, q) if needs & OF_Q and not self.reader else scores
        if self.drafting.peeks:
            progress = self.drafting.peek(step_of(needs, depth, None, progress.active, signal_q, fed), progress)
        place = likeliest(scores) if q is None else draw(q, rows.uniforms[:, DecodeStream.DRAFT, depth - 1])
        ids = place if self.narrow is None else place + self.narrow.d2t[place]
        progress = rows.place_drawn(depth, ids, progress, self.stopping)
        step = None
        if asks and self.reader:
            given = place, ids, fed.hidden[:, 0]
            read = self.reader.of_logits(scores, None, *given) if q is None else self.reader.of_q(q, *given)
            hidden = given[-1] if Signal.FED_HIDDEN in needs else None
            step = DraftStep(depth, ids, progress.active, hidden, **read._asdict())
        elif asks:
            step = step_of(needs, depth, ids, progress.active, signal_q, fed, place)
        return Drawn(ids, q, self._whole(scores, -torch.inf) if Signal.DIVERGENCE in needs else None, step), progress

    def judge(self, step: DraftStep, drawn_hidden: Tensor | None, progress: DraftProgress) -> DraftProgress:
        """Ask the policy which rows draft on. drawn_hidden: (batch, hidden), if the drawn token was fed."""
        return self.drafting.judge(replace(step, drawn_hidden=drawn_hidden), progress)

    def test(self, scores: Tensor, window: Tensor, submitted: Tensor, drawn_from: list[Tensor]) -> Verified:
        """Test the candidates. window: the fed tokens; the candidates follow its first token. drawn_from: q of each
        slot, when sampling."""
        rows, k = self.rows, scores.shape[1] - 1
        candidates = window[:, 1 : k + 1]
        if self.processing.greedy:
            return by_match(likeliest(scores), candidates, submitted)
        p = self.processing.probabilities(scores)
        if self.verifier == "match":
            # Random numbers depend on the token's place in the text, so the row emits the same tokens under any policy.
            places = rows.lengths[:, None] + torch.arange(k + 1, device=p.device)
            random = uniforms(self.seed, rows.keys[:, None], places, 0, DecodeStream.MATCH)
            return sampler_match(p, candidates, submitted, random)
        q = self._whole(torch.stack(drawn_from, dim=1), 0.0) if k else p[:, :0]
        accept, redraw = rows.uniforms[:, DecodeStream.ACCEPT, :k], rows.uniforms[:, DecodeStream.REDRAW, 0]
        return by_ratio(p, q, candidates, submitted, accept, redraw)

    def alternatives(self, drafted: Drafted, scores: Tensor) -> Alternatives | None:
        """Further draws at each slot with their acceptance in the ratio test; None without a ratio test. scores:
        (batch, k + 1, vocab), the target's."""
        if not drafted.slots or self.processing.greedy or self.verifier != "ratio":
            return None
        rows, q = self.rows, self._whole(torch.stack(drafted.probabilities[: drafted.slots], dim=1), 0.0)
        slot, number = (torch.arange(n, device=q.device) for n in (drafted.slots, DRAWS))
        keys, rounds = rows.keys[:, None, None], rows.rounds[:, None, None]
        random = uniforms(self.seed, keys, rounds, slot[:, None], DecodeStream.ALTERNATIVES, number)
        return draw_alternatives(self.processing.probabilities(scores[:, :-1]), q, random)

    def _draft_logits(self, fed: Forward) -> Tensor:
        return fed.logits if self.drafter is None or self.narrow else self.drafter.spread(fed.logits)

    def _whole(self, values: Tensor, lacking: float) -> Tensor:
        """Values of the tokens that can be drawn, (batch, …), → of the pair's vocabulary."""
        return values if self.narrow is None else self.narrow.spread(values, lacking)


def sampler_match(p: Tensor, draft_ids: Tensor, drafted: Tensor, uniform: Tensor) -> Verified:
    """Draw X_i ∼ p at each position and accept Y_i if it equals X_i. The first X_i that differs follows the accepted
    tokens. Acceptance is Σ p·q, lower than in the ratio test. But emitted tokens are the target's own draws, whatever
    was drafted or dropped: every policy is lossless. p: (batch, k + 1, vocab). uniform: (batch, k + 1), one number a
    position."""
    return by_match(draw(p, uniform), draft_ids, drafted)


def step_of(
    needs: frozenset[Signal],
    depth: int,
    token_ids: Tensor | None,
    active: Tensor,
    q: Tensor | PlainSoftmax,
    fed: Forward,
    place: Tensor | None = None,
) -> DraftStep:
    """The DraftStep with the signals in `needs`. q: (batch, vocab), read only if a signal of q is needed. fed: the
    draft forward on the token before Y, (batch, 1, …). place: (batch,), that of each token in q; None: its id."""
    hidden = fed.hidden[:, 0] if Signal.FED_HIDDEN in needs else None
    if not needs & OF_Q:
        return DraftStep(depth, token_ids, active, fed_hidden=hidden)
    asked = {signal.name.lower(): signal in needs for signal in OF_Q}
    logprob, entropy, max_prob, together = signals_of(q, token_ids if place is None else place, **asked)
    return DraftStep(
        depth, token_ids, active, hidden, logprob=logprob, entropy=entropy, max_prob=max_prob, signals=together
    )
