"""DSDE: sets the draft length by the recent divergence of the two models, and by how steady it is."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policies.divergence import LONG, variance_ratio, weighted_variance
from accept_head.inference.policies.spec import Tuning, integer, named
from accept_head.inference.policy import RowPolicy, Signal, VerifyOutcome


@named(
    "dsde",
    "[K]",
    "DSDE: length by the KL divergence of the verified tokens, and its variance",
    integer,
    tuning=Tuning(param="k_first", values=(2, 4, 5, 6, 8, 10)),
)
class DsdePolicy(RowPolicy):
    """Draft min(SL, SL_cap) tokens, rounded (arXiv:2509.01083, eqs 1-8 and 11; docs/theory.md §6):

        SL_max = SL_A,max·(1 + μ_pre / (KLD_max,pre + 1e-6)), kept within k_min..k_max
        SL = (1 − SF·WVIR)·(SL_max − k_min) + k_min  if SF·WVIR ≤ 1, else k_min
        SF = exp(2·μ_last) − 1;  WVIR = Var_w(10 latest KLDs) / Var_w(30 latest), weights 0.85^age
        SL_cap = mean SL of the live rows that are calibrated; no cap if `cap` is off

    k_min is the paper's SL_min. The windows hold the KLDs of single verified tokens (the paper says "values" and weighs
    "steps"; the authors' code keeps tokens). μ_last is the mean of the last round that drafted. WVIR is 1 if the long
    variance is 0. Calibration takes the first `calibration` rounds of a request that draft, with k tokens each (the
    paper: "a small, fixed number"). SL_A,max is the most accepted in one of them; μ_pre and KLD_max,pre are the mean
    and the largest KLD. Rows in calibration do not count for the cap and are not capped.

    fork: follow the authors' vLLM fork instead of the paper (KLScheduler; docs/theory.md §6). Weights are 0.9^age. The
    short window is a third of the known KLDs. WVIR is 20 if the long variance is below 1e-6. KLDs are divided by
    `temperature`, which a policy cannot read itself. SL_max = round(SL_A,max·(1 + 0.5·μ/max)). The minimum is
    ⌈SL_max / 10⌉ tokens, never below k_min (6 in the fork). SL and the cap are rounded up. Calibration ends before the
    round with the 30th KLD; k doubles in it after a fully accepted round. The fork's windows also hold KLDs after a
    rejection; here there are none.

    A row's state restarts with each request; only the cap depends on other rows.
    """

    needs = frozenset({Signal.DIVERGENCE})
    PER_ROW = ("history", "known", "last", "rounds", "accepted", "total", "count", "peak", "draft")
    capture = Capture(read=PER_ROW)
    LARGEST = 1e3  # nats: keeps an infinite KLD of one token out of the sums

    def __init__(
        self,
        k: int = 5,
        *,
        k_min: int = 2,
        k_max: int = 20,
        calibration: int = 6,
        cap: bool = True,
        fork: bool = False,
        temperature: float = 1.0,
    ):
        check_bounds("dsde", k_min, k_max)
        for name, value in (("k", k), ("calibration", calibration)):
            if value < 1:
                raise InputError(f"dsde {name} is {value}, expected a positive integer")
        if not 0 <= temperature < float("inf"):
            raise InputError(f"dsde temperature is {temperature}, expected a number, 0 or more")
        self.k, self.k_min, self.max_draft_tokens = min(k, k_max), k_min, k_max
        self.calibration, self.cap, self.fork = calibration, cap, fork
        self.temperature = temperature if fork and temperature else 1.0

    def start(self, batch: int, device: torch.device) -> None:
        zero = torch.zeros(batch, device=device)
        self.history = torch.zeros(batch, LONG, device=device)  # KLDs of verified tokens, the newest last
        self.known = zero.long()  # how many values of the history, at its end, are filled
        self.last = zero.clone()  # mean KLD of the last round
        self.rounds = zero.long()  # of calibration; the next line has their statistics
        self.accepted, self.total, self.count, self.peak = (zero.clone() for _ in range(4))
        self.draft = torch.full((batch,), self.k, device=device)  # tokens to draft in a calibration round

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        for name in self.PER_ROW:
            getattr(self, name)[rows] = self.k if name == "draft" else 0

    def select(self, rows: Tensor) -> None:
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name)[rows])

    def start_round(self, live: Tensor) -> Tensor:
        calibrated = self.known >= LONG if self.fork else self.rounds >= self.calibration
        longest, shortest = self._bounds()
        penalty = ((2 * self.last / self.temperature).exp() - 1) * self._variance_ratio()
        lengths = torch.where(penalty <= 1, (1 - penalty) * (longest - shortest) + shortest, shortest)
        lengths = lengths.ceil() if self.fork else lengths
        if self.cap:
            counts = live & calibrated
            mean = torch.where(counts, lengths, 0.0).sum() / counts.sum().clamp(min=1)
            lengths = torch.minimum(lengths, mean.ceil() if self.fork else mean)
        return torch.where(calibrated, lengths.round().long(), self.draft)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """SL_max and SL_min, (batch,) each."""
        mean = self.total / self.count.clamp(min=1)
        if not self.fork:
            longest = self.accepted * (1 + mean / (self.peak + 1e-6))
            return longest.clamp(self.k_min, self.max_draft_tokens), torch.full_like(longest, self.k_min)
        longest = (self.accepted * (1 + 0.5 * mean / torch.where(self.peak > 0, self.peak, 1.0))).round()
        longest = longest.clamp(self.k_min, self.max_draft_tokens)
        return longest, torch.minimum(longest, (longest / 10).ceil().clamp(min=self.k_min))

    def _variance_ratio(self) -> Tensor:
        """WVIR, (batch,)."""
        age = torch.arange(LONG - 1, -1, -1, device=self.history.device)
        valid = age < self.known.clamp(min=1)[:, None]
        if not self.fork:
            return variance_ratio(self.history, valid)
        short = age < (self.known // 3).clamp(min=1)[:, None]
        latest, overall = (weighted_variance(self.history, window, 0.9) for window in (short, valid))
        return torch.where(overall < 1e-6, 20.0, latest / overall)

    def observe(self, outcome: VerifyOutcome) -> None:
        assert outcome.divergence is not None
        if not outcome.divergence.shape[1]:
            return
        judged = outcome.judged * outcome.live
        slots = torch.arange(outcome.divergence.shape[1], device=judged.device)
        values = outcome.divergence.float().clamp(0, self.LARGEST)
        values = torch.where(slots < judged[:, None], values, 0.0)
        drafted = judged > 0
        known = self.known + judged
        collects = drafted & (known < LONG if self.fork else self.rounds < self.calibration)
        self.rounds = self.rounds + collects
        self.accepted = torch.where(collects, torch.maximum(self.accepted, outcome.accepted), self.accepted)
        self.total = self.total + values.sum(-1) * collects
        self.count = self.count + judged * collects
        self.peak = torch.where(collects, torch.maximum(self.peak, values.amax(-1)), self.peak)
        if self.fork:
            doubled = torch.where(outcome.accepted >= self.draft, 2 * self.draft, self.draft)
            self.draft = torch.where(collects, doubled.clamp(self.k_min, self.max_draft_tokens), self.draft)
        self.last = torch.where(drafted, values.sum(-1) / judged.clamp(min=1), self.last)
        # The new values stand after the old ones; shift the window by their number to keep the latest LONG.
        latest = judged[:, None] + torch.arange(LONG, device=judged.device)
        self.history = torch.cat([self.history, values], dim=-1).gather(1, latest)
        self.known = known.clamp(max=LONG)
