"""Online training: trains a head while it serves, on the tokens that it judged and verification's results for them.

OnlineRecalibration adapts slope, signal weights and intercepts of the head's logit within some hundred rounds. Online
training adapts the head's own weights, which takes some hundred responses. After a shift of the data this is most of
what retraining regains (docs/log.md).
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from accept_head.alternatives import DRAWS, Alternatives
from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.scorer import Score, make_scorer
from accept_head.inference.policies.online.recalibration import OnlineRecalibration
from accept_head.inference.policy import VerifyOutcome
from accept_head.signals import SIGNALS

LOGPROB = SIGNALS.index("draft_logprob")


class Judged(NamedTuple):
    """Tokens that the head has scored, (n, …): the inputs of the head, and the results of verification.

    weight: 1 if verification judged the token, else 0. label: a(Y) if known, else 1 for accepted and 0 for rejected.
    """

    hidden: Tensor
    signals: Tensor
    token_ids: Tensor
    depth: Tensor
    label: Tensor
    weight: Tensor


class Memory(NamedTuple):
    """The last `slots` positions that the head has scored: hidden (slots, hidden_size), signals (slots, 3) and depth
    (slots,). The other fields, (slots, draws), hold the drafted token, then its alternatives."""

    hidden: Tensor
    signals: Tensor
    depth: Tensor
    token_ids: Tensor
    logprob: Tensor
    label: Tensor
    weight: Tensor

    @classmethod
    def empty(cls, slots: int, draws: int, hidden: Tensor) -> Memory:
        """An empty memory on the device of `hidden`, (n, hidden_size), and in its dtype."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return hidden.new_zeros(*shape, dtype=dtype)

        states, signals = hidden.new_zeros(slots, hidden.shape[-1]), zeros(slots, 3)
        depth, ids = zeros(slots, dtype=torch.long), zeros(slots, draws, dtype=torch.long)
        return cls(states, signals, depth, ids, *[zeros(slots, draws) for _ in range(3)])

    def judged(self, places: Tensor) -> Judged:
        """The draws at these places, in the head's input form. places: (n,) indices into all draws, flattened."""
        slots, draws = places // self.weight.shape[1], places % self.weight.shape[1]
        signals = self.signals[slots]
        signals[:, LOGPROB] = self.logprob[slots, draws]  # the only signal that depends on the token
        token_ids, label, weight = (part[slots, draws] for part in (self.token_ids, self.label, self.weight))
        return Judged(self.hidden[slots], signals, token_ids, self.depth[slots], label, weight)


class OnlineTraining:
    """Takes gradient steps on a copy of a head's weights while decoding. The given head does not change.

    Every INTERVAL rounds it takes STEPS steps of Adam on the cross-entropy of tokens sampled from the last SLOTS
    positions. Only judged tokens count: accepted ones and the first rejected one, as in OnlineRecalibration. The loss
    is of the *corrected* logit, so that slope and intercepts are not learnt twice. A label is a(Y), as in training, if
    the host gives it; else it is the outcome of the test, which is a(Y) on average. A host that gives a(Y) also gives
    it for some alternatives to each token, which are learnt in the same way. A head that reads the state *at* a token
    does not learn from alternatives, because the state at them is unknown. Decisions use a running average of the
    weights, over about 1/AVERAGE steps.

    lr: of Adam; 0.064 / hidden_size when left out, a sixth of that of `accept-head train`. All judged tokens count
    alike, whatever their tenant. The influence of one tenant is not bounded, so this is for trusted traffic.

    Takes SLOTS·hidden_size numbers in the dtype of the draft's states, and five times the head's weights. There is no
    sync. What was learnt outlives `start`. `served` is the current head, which can be saved.

    Raises InputError when lr is out of range, or when the head predicts more than a(Y).
    """

    INTERVAL, STEPS, SIZE, MOST = 20, 2, 256, 2048
    SLOTS, FEWEST = 16384, 256
    AVERAGE = 0.05

    def __init__(self, head: AcceptanceHead, lr: float | None = None):
        if lr is not None and not lr > 0:
            raise InputError(f"online training lr is {lr}, expected a positive number")
        if head.config.predictions != ("token",):
            raise InputError(f"online training is for a head that predicts 'token', this one '{head.config.predicts}'")
        with torch.inference_mode(False):  # vLLM builds and asks policies in inference mode, without gradients
            self.learner, self.served = (_copy(head) for _ in range(2))
        self.served.requires_grad_(False)
        parameters = [parameter.requires_grad_(True) for parameter in self.learner.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=lr or 0.064 / head.config.hidden_size, betas=(0.9, 0.99))
        self.random = torch.Generator(parameters[0].device).manual_seed(0)
        self.judges_alternatives = head.config.reads == "before"
        self.memory: Memory | None = None
        self.place = self.noted = self.rounds = 0
        self.learning = True
        self.round: list[tuple[int, int]] = []  # first slot and rows of each depth that was judged
        self.scorer: Score = make_scorer(self.served, table=False)

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self, learning: bool = True) -> None:
        """Begin a round. learning: whether to remember the tokens that are scored from here on."""
        self.round, self.learning = [], learning

    def score(self, hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        """P̂ of the next depth's tokens, (batch,), with the arguments of HeadPolicy."""
        if self.learning:
            self._note(hidden, signals, token_ids)
        return self.scorer(hidden, signals, token_ids)

    def _note(self, hidden: Tensor, signals: Tensor | None, token_ids: Tensor | None) -> None:
        rows = len(hidden)
        if self.memory is None:
            draws = 1 + DRAWS * self.judges_alternatives
            self.memory = Memory.empty(max(self.SLOTS, rows), draws, hidden)
        memory = self.memory
        if self.place + rows > len(memory.weight):
            self.place = 0
        here = slice(self.place, self.place + rows)
        memory.weight[here] = 0.0
        # A copy, because the host's next forward may overwrite its tensors. A NaN, for example from a model in half
        # precision, would stay in Adam's averages forever.
        memory.hidden[here] = hidden.nan_to_num(0.0, 0.0, 0.0)
        if signals is not None:
            memory.signals[here] = signals.float().nan_to_num(0.0, 0.0, 0.0)
            memory.logprob[here, 0] = memory.signals[here, LOGPROB]
        if token_ids is not None:
            memory.token_ids[here, 0] = token_ids
        memory.depth[here] = len(self.round)
        self.round.append((self.place, rows))
        self.place += rows
        self.noted = max(self.noted, self.place)

    def forget_round(self) -> None:
        """Forget the last round, because rows have changed."""
        self.round = []

    def observe(self, outcome: VerifyOutcome, correction: OnlineRecalibration) -> None:
        """Learn from the round whose tokens were judged last."""
        tokens, self.round = self.round, []
        if self.memory is not None:
            labels, judged = outcome.labels(len(tokens)), torch.where(outcome.live, outcome.judged, 0)
            for depth, (place, rows) in enumerate(tokens):
                here, counts = slice(place, place + rows), (depth < judged) & labels[:, depth].isfinite()
                self.memory.label[here, 0] = torch.where(counts, labels[:, depth], 0.0)
                self.memory.weight[here, 0] = counts.float()
                self._note_alternatives(outcome.alternatives, depth, here, counts)
        self.rounds += 1
        if self.rounds % self.INTERVAL == 0 and self.noted >= self.FEWEST:
            self._train(len(outcome.live), correction)

    def _note_alternatives(self, drawn: Alternatives | None, depth: int, here: slice, counts: Tensor) -> None:
        """Remember the alternatives at a depth, if the host gives any. counts: (rows,) bool, rows to learn from."""
        if not self.judges_alternatives or drawn is None or depth >= drawn.token_ids.shape[1]:
            return
        assert self.memory is not None
        known = counts[:, None] & drawn.acceptance[:, depth].isfinite()
        self.memory.token_ids[here, 1:] = drawn.token_ids[:, depth]
        self.memory.logprob[here, 1:] = torch.where(known, drawn.logprob[:, depth].float(), 0.0)
        self.memory.label[here, 1:] = torch.where(known, drawn.acceptance[:, depth].float(), 0.0)
        self.memory.weight[here, 1:] = known.float()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _train(self, rows: int, correction: OnlineRecalibration) -> None:
        # A batch in proportion to the rows: the number of steps is the same, and each token is sampled as often.
        size = min(self.SIZE * rows, self.MOST)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(self.STEPS):
                loss = self._loss(self._sample(size), correction)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                with torch.no_grad():
                    for own, learnt in zip(self.served.parameters(), self.learner.parameters(), strict=True):
                        own.lerp_(learnt, self.AVERAGE)
            self.scorer = make_scorer(self.served, table=False)

    def _sample(self, size: int) -> Judged:
        """Sample (size, …) of the judged draws, with equal probabilities."""
        assert self.memory is not None
        upto = self.memory.weight[: self.noted].flatten().double().cumsum(0)
        drawn = torch.rand(size, generator=self.random, device=upto.device, dtype=torch.float64) * upto[-1]
        return self.memory.judged(torch.searchsorted(upto, drawn, right=True).clamp(max=len(upto) - 1))

    def _loss(self, tokens: Judged, correction: OnlineRecalibration) -> Tensor:
        config = self.learner.config
        logits = self.learner(
            tokens.hidden,
            tokens.signals if config.signals else None,
            tokens.token_ids if config.reads_embedding else None,
        )[..., 0]
        read = self.learner.signal_inputs(tokens.signals) if config.signals else None
        corrected = correction.corrected(logits.float(), tokens.depth, read)
        # If nothing is judged yet, the sample has the weight 0.
        return nn.functional.binary_cross_entropy_with_logits(corrected, tokens.label, weight=tokens.weight)


def _copy(head: AcceptanceHead) -> AcceptanceHead:
    """A copy of the head with its own weights, but the same embedding matrix."""
    return copy.deepcopy(head, {id(head.embeddings): head.embeddings})
