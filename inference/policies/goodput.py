"""One draft length for the batch: the one with the most expected tokens per second at the acceptance seen so far."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import Tuning, costs, named
from accept_head.inference.policy import RowPolicy, VerifyOutcome


class Probe:
    """Drafts one token after `every` rounds in a row without drafts (0: never). Without drafts a policy learns nothing
    that could lead back to drafting. Not in the papers."""

    def __init__(self, policy: str, every: int):
        if every < 0:
            raise InputError(f"{policy} probe is {every}, expected a number of rounds or 0")
        self.every, self.idle = every, torch.zeros((), dtype=torch.long)

    def start(self, device: torch.device) -> None:
        self.idle = torch.zeros((), dtype=torch.long, device=device)

    def length(self, wanted: Tensor, allowed: Tensor | bool = True) -> Tensor:
        """() int, the draft length of this round. allowed: whether a token may be drafted when `wanted` is 0."""
        due = (wanted == 0) & (self.idle >= self.every) & allowed if self.every else torch.zeros_like(wanted).bool()
        length = torch.where(due, 1, wanted)
        self.idle = torch.where(length == 0, self.idle + 1, 0)
        return length


@named(
    "goodput",
    "[COSTS]",
    "SmartSpec: the K with the best expected tokens/s for the batch",
    costs,
    tuning=Tuning(param="decay", values=(1.0, 0.99, 0.95), argument="COSTS"),
)
class GoodputPolicy(RowPolicy):
    """SmartSpec, TurboSpec (arXiv:2406.14066; docs/theory.md §8). All B live rows draft the same number of tokens,

        k* = argmax_{0 ≤ k ≤ k_max}  B·(1 + a + … + a^k) / (k·t_draft(B) + t_target((k + 1)·B)),

    where t_target of k = 0 is that of a round without drafts, and its value is multiplied by 1.1, as drafting has costs
    besides the forwards. a: accepted / judged tokens so far. The counts start as if a share `rate` of `prior` tokens
    had been accepted. decay: factor on the counts at each round with drafts; 1 = no decay, 0.95 averages over about 20
    rounds. probe: one round of k = 1 after so many rounds of k = 0. costs: learnt while serving when left out.

    The authors' code counts tokens accepted after a rejected one too, and divides by all k drafted tokens. Here tokens
    after a rejection are not judged and not counted: accepted per drafted would fall with the length of the draft. The
    authors have no prior, but read the counts only every few seconds. Without either, one rejected token gives a = 0.

    Global by design: a outlives `start`. Rows have no state but their lengths.
    """

    capture = Capture(carried=("probe.idle",), read=("probe.idle", "accepted", "judged", "lengths"))
    CONSERVATIVE = 1.1

    def __init__(
        self,
        costs: PairCosts | LearntCosts | None = None,
        *,
        rate: float = 0.7,
        prior: float = 20.0,
        decay: float = 1.0,
        probe: int = 32,
        k_max: int = 8,
    ):
        if not 0 < rate < 1:
            raise InputError(f"goodput rate is {rate}, expected an acceptance rate between 0 and 1")
        if not 0 < prior < float("inf"):
            raise InputError(f"goodput prior is {prior}, expected a positive number of tokens")
        if not 0 < decay <= 1:
            raise InputError(f"goodput decay is {decay}, expected a number above 0 and at most 1")
        if k_max < 1:
            raise InputError(f"goodput k_max is {k_max}, expected a positive integer")
        self.costs, self.decay, self.max_draft_tokens = costs or LearntCosts(), decay, k_max
        self.probe = Probe("goodput", probe)
        self.rate, self.prior = rate, prior
        self.forget()

    def forget(self) -> None:
        self.accepted, self.judged = torch.tensor(self.rate * self.prior), torch.tensor(float(self.prior))
        self.costs.forget()

    def start(self, batch: int, device: torch.device) -> None:
        self.probe.start(device)
        self.accepted, self.judged = self.accepted.to(device), self.judged.to(device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.lengths[rows] = lengths

    def select(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]

    def start_round(self, live: Tensor) -> Tensor:
        rows, context = live.sum(), torch.where(live, self.lengths, 0).sum()
        goodput = self.goodput(rows, context)
        goodput = torch.cat([self.CONSERVATIVE * goodput[:1], goodput[1:]])
        return self.probe.length(torch.argmax(goodput)).expand(live.shape)

    def goodput(self, rows: Tensor, context: Tensor) -> Tensor:
        """(k_max + 1,) expected tokens per second with 0, 1, … draft tokens. rows, context: (), the number of live rows
        and the sum of their tokens."""
        k = torch.arange(self.max_draft_tokens + 1, device=rows.device)
        seconds = self.costs.draft_seconds(rows, context, k) + self.costs.verify_seconds((k + 1) * rows, context)
        seconds = torch.where(k == 0, self.costs.plain_seconds(rows, context), seconds)
        return rows * ((self.accepted / self.judged) ** k).cumsum(0) / seconds

    def observe(self, outcome: VerifyOutcome) -> None:
        self.lengths = outcome.lengths
        judged, accepted = ((count * outcome.live).sum() for count in (outcome.judged, outcome.accepted))
        decay = torch.where(judged > 0, self.decay, 1.0)
        self.judged, self.accepted = decay * self.judged + judged, decay * self.accepted + accepted
