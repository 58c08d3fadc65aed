"""AdaSpec: draft while the predicted tokens per second rise, then drop the tokens that are not worth verifying."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.budget import Ranked, graph_size
from accept_head.inference.policies.goodput import Probe
from accept_head.inference.policies.spec import Tuning, costs, named
from accept_head.inference.policy import BOTH, DraftStep, RowPolicy, Signal, Verifier, VerifyOutcome

STRIDE = 32  # captured graphs have 1, 2, 4, 8, 16, 32, 64, 96, … tokens


@named(
    "adaspec",
    "[COSTS]",
    "AdaSpec: draft, verify and drop by expected tokens/s, within an SLO",
    costs,
    tuning=Tuning(param="k_max", values=(8,), argument="COSTS"),
)
class AdaSpecPolicy(RowPolicy):
    """AdaSpec (arXiv:2503.05096; docs/theory.md §8). With B live rows and s_{r,i} = Π_{j≤i} q(Y_{r,j}), after k draft
    steps:

        G = (B + Σ s) / T,   T = k draft forwards + one verification of B + (drafted tokens) tokens.   (Alg. 3)

    Drafting (Alg. 1), all rows together: predict s_{k+1} = s_k·c̄, where c̄ is the mean confidence q(Y) so far, 0.6 at
    first. If G would fall, stop before the draft forward. Else draw the tokens, replace c̄ by the real q(Y), keep the
    tokens, and stop if G fell. The first token has to raise G.

    slo_ms: the most milliseconds of a round, since a request may get a single token from it; 0 = no limit. A draft step
    that would make T longer is not run. If even a round without drafts is longer, no length meets the limit. Then the
    length with the largest G, the least time per token, is taken. (Commented out in the release.)

    Elimination (Alg. 2): drop drafted tokens by ascending s while G does not fall, one at a time, or with `graph` down
    to the next smaller captured graph. lossy=True does this as published. It is biased under the ratio test: s depends
    on the token that is dropped. The default applies the same criterion with what is known before the draw:

        verify Y_{r,i} and the tokens before it  ⇔  s_{r,i−1}·max q_{r,i} ≥ λ·(seconds of one more token to verify),

    λ: the last round's G; in the first round, B/T without drafts. For greedy drafts the left side is s. It depends only
    on the tokens before Y_{r,i}, and λ only on past rounds. A budget for the batch would be biased here, even by max q:
    the depth of other rows depends on the batch-wide stop, and so on the tokens that this row draws after Y_{r,i}.

    graph: a forward takes as long as the next larger captured graph, of 1, 2, 4, 8, 16, 32, 64, 96, … tokens. probe:
    after so many rounds without drafts, draft one token if the limit allows (not in the paper). costs: learnt while
    serving when left out.

    Global by design: c̄ (it outlives `start`), λ, and the stop. Rows have no state but their lengths. Other differences
    to the release: c̄ includes every drafted token, at the end of the round (the release omits the step after which G
    fell). s of a row that has stopped is not predicted further. A verification reads each row's context once (the
    release's expanded batches read it for each token).
    """

    needs = frozenset({Signal.LOGPROB, Signal.MAX_PROB})
    CONFIDENCE = 0.6
    OF_A_ROUND: tuple[str, ...] = ("rows", "context", "active", "s", "q", "drawn", "before", "expected", "tokens")
    OF_A_ROUND += ("drafting", "goodput", "least", "limit")
    capture = Capture(
        carried=(*OF_A_ROUND, "probe.idle"),
        read=("lengths", "last", "confidence", "probe.idle"),
        unread=("confidences", "drafted"),
    )

    def __init__(
        self,
        costs: PairCosts | LearntCosts | None = None,
        *,
        slo_ms: float = 0.0,
        k_max: int = 8,
        lossy: bool = False,
        graph: bool = False,
        probe: int = 32,
    ):
        if slo_ms < 0:
            raise InputError(f"adaspec slo_ms is {slo_ms}, expected milliseconds, or 0 for no limit")
        if k_max < 1:
            raise InputError(f"adaspec k_max is {k_max}, expected a positive integer")
        if lossy:
            warnings.warn(
                "adaspec lossy: tokens are dropped by what was drawn, so sampled output is not the target's under the "
                "ratio test",
                stacklevel=2,
            )
        self.costs, self.slo = costs or LearntCosts(), slo_ms / 1e3
        self.max_draft_tokens, self.lossy, self.graph = k_max, lossy, graph
        self.lossless: frozenset[Verifier] = frozenset({"match"}) if lossy else BOTH
        self.probe = Probe("adaspec", probe)
        for name in self.OF_A_ROUND:
            setattr(self, name, None)
        self.forget()

    def forget(self) -> None:
        self.confidence = torch.tensor(self.CONFIDENCE)  # c̄
        self.confidences, self.drafted = torch.zeros(()), torch.zeros(())  # Σ q(Y), number of tokens
        self.costs.forget()

    def start(self, batch: int, device: torch.device) -> None:
        self.probe.start(device)
        for name in ("confidence", "confidences", "drafted"):
            setattr(self, name, getattr(self, name).to(device))
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.last = torch.zeros((), device=device)  # G of the previous round; 0 before the first

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.lengths[rows] = lengths

    def select(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]

    # Drafting

    def start_round(self, live: Tensor) -> Tensor:
        self.rows, self.context = live.sum(), torch.where(live, self.lengths, 0).sum()
        self.active, self.s = live, torch.ones(live.shape, device=live.device)
        # Per depth, (batch,) each: q(Y), s, and s_{k−1}·max q_k, which is known before the draw.
        self.q, self.drawn, self.before = list[Tensor](), list[Tensor](), list[Tensor]()
        self.expected, self.tokens = self.rows.float(), self.rows  # B + Σ s; tokens to verify
        self.drafting = torch.zeros((), device=live.device)  # seconds
        alone = self.costs.plain_seconds(self._padded(self.tokens), self.context)
        self.goodput = self.rows / alone
        self.least = torch.where(self.last > 0, self.last, self.goodput) * self._one_more_token()
        self.limit = torch.where(alone > self.slo, torch.inf, self.slo) if self.slo else torch.inf
        ahead, seconds = self._predict(live)
        wanted = torch.where((ahead > self.goodput) & (seconds <= self.limit), self.max_draft_tokens, 0)
        return self.probe.length(wanted, seconds <= self.limit).expand(live.shape)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        assert step.logprob is not None and step.max_prob is not None
        self.drafting = self.drafting + self._draft_step()
        self.q.append(step.logprob.exp().clamp(max=1))
        self.before.append(self.s * step.max_prob)
        self.s = torch.where(self.active, self.s * self.q[-1], 0.0)
        self.drawn.append(self.s)
        self.expected, self.tokens = self.expected + self.s.sum(), self.tokens + self.active.sum()
        goodput = self.expected / (self.drafting + self._verifying(self.tokens))
        fell, self.goodput = goodput < self.goodput, goodput
        ahead, seconds = self._predict(step.active)
        self.active = step.active & ~fell & (ahead >= goodput) & (seconds <= self.limit)
        return self.active

    def _predict(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """G and T if these rows draft one more token."""
        expected = self.expected + self.confidence * (self.s * active).sum()
        seconds = self.drafting + self._draft_step() + self._verifying(self.tokens + active.sum())
        return expected / seconds, seconds

    # Elimination

    def trim(self, drafted: Tensor) -> Tensor:
        depth = torch.arange(len(self.drawn), device=drafted.device)
        real = depth < drafted[:, None]
        s = torch.where(real, torch.stack(self.drawn, dim=1), 0.0)
        if self.lossy:
            kept = self._eliminate(Ranked.of(s, real), len(drafted))
        else:
            kept = (real & (torch.stack(self.before, dim=1) >= self.least)).long().cumprod(1).sum(1)
        gain = torch.where(depth < kept[:, None], s, 0.0).sum()
        self.goodput = (self.rows + gain) / (self.drafting + self._verifying(self.rows + kept.sum()))
        return kept

    def _eliminate(self, ranked: Ranked, batch: int) -> Tensor:
        """(batch,) tokens kept by Alg. 2: drop the last of the ranked tokens as long as G does not fall."""
        count = ranked.real.sum()
        dropped = torch.arange(len(ranked.real) + 1, device=count.device)
        left = (count - dropped).clamp(min=0)
        sizes = self.rows + left
        goodput = (self.rows + ranked.gains[left]) / (self.drafting + self._verifying(sizes))
        stop = (dropped == 0) | (
            (dropped <= count) & (sizes == graph_size(sizes, STRIDE) if self.graph else dropped > 0)
        )
        here = torch.where(stop, dropped, 0).cummax(0).values  # the largest allowed number of drops up to each
        rises = goodput[here][1:] >= goodput[here][:-1]
        return ranked.kept(count - torch.take(here, rises.long().cumprod(0).sum()), batch)

    def observe(self, outcome: VerifyOutcome) -> None:
        self.last, self.lengths = self.goodput, outcome.lengths
        for depth, q in enumerate(self.q):
            real = outcome.live & (depth < outcome.drafted)
            self.confidences = self.confidences + torch.where(real, q, 0.0).sum()
            self.drafted = self.drafted + real.sum()
        mean = self.confidences / self.drafted
        self.confidence = torch.where(self.drafted > 0, mean, self.CONFIDENCE)

    # Forward times, seconds

    def _draft_step(self) -> Tensor:
        """Seconds of the next draft step of this round."""
        drawn, rows = len(self.drawn), self._padded(self.rows)
        context = self.context + drawn * self.rows
        return self.costs.draft_seconds(rows, context, drawn + 1) - self.costs.draft_seconds(rows, context, drawn)

    def _verifying(self, tokens: Tensor) -> Tensor:
        return self.costs.verify_seconds(self._padded(tokens), self.context)

    def _one_more_token(self) -> Tensor:
        one = self.costs.verify_seconds(self.rows + 1, self.context)
        return one - self.costs.verify_seconds(self.rows, self.context)

    def _padded(self, tokens: Tensor) -> Tensor:
        return graph_size(tokens, STRIDE) if self.graph else tokens
