"""transformers' heuristic schedule: draft two tokens more after a fully accepted round, else one less."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import Tuning, integer, named
from accept_head.inference.policy import RowPolicy, VerifyOutcome


@named(
    "hf-heuristic",
    "[K]",
    "transformers: 2 more after full acceptance, else 1 less",
    integer,
    tuning=Tuning(param="first", values=(1, 2, 5, 10, 20), by_row=True),
)
class HfHeuristicPolicy(RowPolicy):
    """Draft K tokens; then K ← K + 2 if all drafted tokens were accepted, else max(1, K − 1), per row.

    This is transformers' `num_assistant_tokens_schedule="heuristic_transient"` (5.19,
    generation/candidate_generator.py) without a confidence threshold; k is its `num_assistant_tokens`. As there, a
    round that drafts nothing, the last of a response, counts as fully accepted.

    k_max: transformers has none; the default 40 is that of SVIP's port of the schedule. K itself is clamped to k_max,
    so that it falls with the first rejection. A larger k starts at k_max.

    persist: the schedule "heuristic", which carries K over to later requests and calls. A new request starts with the
    rounded mean K of the rows of the last round; with one row, that is the last K of the request before. This makes K
    global by design. Otherwise a row's K restarts with each request.
    """

    capture = Capture(read=("budgets",), unread=("first",))

    def __init__(self, k: int = 20, *, k_max: int = 40, persist: bool = False):
        for name, value in (("k", k), ("k_max", k_max)):
            if value < 1:
                raise InputError(f"hf-heuristic {name} is {value}, expected a positive integer")
        self.k, self.max_draft_tokens, self.persist = min(k, k_max), k_max, persist
        self.forget()

    def forget(self) -> None:
        self.first = torch.tensor(self.k)  # K of a new request

    def start(self, batch: int, device: torch.device) -> None:
        self.first = self.first.to(device)
        self.budgets = self.first.repeat(batch)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.budgets[rows] = self.first

    def select(self, rows: Tensor) -> None:
        self.budgets = self.budgets[rows]

    def start_round(self, live: Tensor) -> Tensor:
        return self.budgets

    def observe(self, outcome: VerifyOutcome) -> None:
        live, full = outcome.live, outcome.accepted == outcome.submitted
        changed = torch.where(full, self.budgets + 2, self.budgets - 1).clamp(1, self.max_draft_tokens)
        self.budgets = torch.where(live, changed, self.budgets)
        if self.persist:
            count = live.sum()
            mean = ((self.budgets * live).sum() / count.clamp(min=1)).round().long()
            self.first = torch.where(count > 0, mean, self.first)
