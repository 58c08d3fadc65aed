"""Online recalibration: corrects a head's acceptance probabilities while serving, by the results of verification.

    logit P̂'(Y_d) = s·z + u·x + v·h + b_d    z: the logit of the head's P̂(Y_d accepted | those before it were), d: its
                                             depth; x: the draft signals of Y_d, normalised as in the head, if it
                                             reads any; h: the head's own last state of Y_d, scaled to length 1

v corrects the head's last layer, so that the correction can differ between kinds of tokens. s = 1, u = v = 0, b = 0 is
the head itself. The prior is centred there, and parameters return to it when no more tokens are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accept_head.calibration import DepthCalibration
from accept_head.errors import InputError
from accept_head.inference.policies.online.newton_sums import NewtonSums
from accept_head.inference.policies.online.rounds import JudgedRound, Token, gathered
from accept_head.inference.policy import VerifyOutcome

ANONYMOUS = 0  # the tenant of unnamed rows


class OnlineRecalibration:
    """s, u, v, b of one head: a pooled fit, and a fit for each tenant's rows. θ = (log s, u, v, b_1, …, b_k_max); θ = 0
    is the head itself.

    A tenant's θ_t. Every INTERVAL rounds it takes one damped Newton (IRLS) step on the log-likelihood of the judged
    tokens of the tenant's rows. Accepted tokens have the label 1, the first rejected one 0; if the host gives a(Y), it
    is the label. Tokens after a rejection, or not submitted, are censored. Each round's log-likelihood is kept as its
    second-order expansion at the θ_t of that round, as sums over tokens. The step goes towards the optimum of all
    rounds together:

        (Σ_r g_r·XᵀWX + prior·1)·(s − 1, u, v, b) = Σ_r g_r·(XᵀWX·(s − 1, u, v, b)_r + Xᵀ(label − p))

    with W = p·(1 − p) and g_r = 2^(−age of round r / half_life). A step is at most STEP in each coordinate, and for v
    the share FOLLOWS of the way. θ_t is kept within |log s| ≤ MOST_SLOPE, |u| ≤ MOST_WEIGHT in each coordinate, |b| ≤
    MOST_INTERCEPT and ‖v‖ ≤ MOST_STATE.

    Pooled θ, for the rows of all tenants. With n_t the labels of tenant t (each counts g_r) and w_t = min(n_t, VOTES),

        θ  follows  Σ_t w_t·θ_t / max(Σ_t w_t, VOTES / tenant_share),   in steps of the same size.

    **Influence of one tenant.** Let θ° be the pooled θ without the rows of tenant a, all else equal. Then in every
    round, whatever a drafts and however it is verified,

        |log s − log s°| ≤ 2·tenant_share·MOST_SLOPE,  |u − u°| ≤ 2·tenant_share·MOST_WEIGHT,
        |b_d − b°_d| ≤ 2·tenant_share·MOST_INTERCEPT,    ‖v − v°‖ ≤ 2·tenant_share·MOST_STATE,

    The last one bounds the effect of v on any logit, as ‖h‖ = 1. docs/theory.md §11 has the proof. With per_tenant,
    rows are corrected by their own tenant's θ_t, and no tenant influences another.

    Never absorbing with k_min ≥ 1: Y_1 is drafted and judged in every round. Y_{d+1} is drafted whenever Y_1..Y_d are
    likely enough by θ, which is learnt from depths up to d alone. b_d of a depth that is not reached any more returns
    to 0 as its labels decay.

    signals: means and deviations of the signals in x. state: channels of h; 0 = no v. half_life: of the labels, in
    rounds of the batch. prior: Fisher information of θ_t = 0, in each coordinate. For comparison, a label at depth d
    has the information p·(1 − p) ≤ 1/4 about b_d, and as much about all coordinates of v together. tenant_share: in
    (0, 1], the largest share of one tenant in the pooled θ. The default 1 trusts all tenants, and is the only useful
    value if rows have no tenants. State is on the device, and there is no sync. What was learnt outlives `start`.
    learning: set False to freeze it.

    Raises InputError naming the field when one is out of range.
    """

    INTERVAL, STEP = 20, 0.25
    FOLLOWS = 0.25
    MOST_SLOPE, MOST_WEIGHT, MOST_STATE, MOST_INTERCEPT = math.log(4), 3.0, 8.0, 3.0
    VOTES = 200.0
    TENANTS = 64  # remembered at once; a further one replaces the one named longest ago

    def __init__(
        self,
        k_max: int,
        *,
        signals: tuple[Sequence[float], Sequence[float]] = ((), ()),
        state: int = 0,
        half_life: float = 1000.0,
        prior: float = 4.0,
        tenant_share: float = 1.0,
        per_tenant: bool = False,
    ):
        if not half_life > 0:
            raise InputError(f"online recalibration half_life is {half_life}, expected a positive number of rounds")
        if not prior >= 0:
            raise InputError(f"online recalibration prior is {prior}, expected a number that is not negative")
        if not 0 < tenant_share <= 1:
            raise InputError(
                f"online recalibration tenant_share is {tenant_share}, expected a share above 0, at most 1"
            )
        self.half_life, self.prior, self.tenant_share, self.per_tenant = half_life, prior, tenant_share, per_tenant
        self.learning = True
        self.normal = torch.tensor(signals, dtype=torch.float64)  # (2, signals) mean and deviation
        # θ[:signals] is log s and u; θ[:shared] also has v; the rest is b.
        self.state, self.signals = state, 1 + self.normal.shape[1]
        self.shared = self.signals + state
        box = [self.MOST_SLOPE] + [self.MOST_WEIGHT] * (self.signals - 1)
        box += [self.MOST_STATE] * state + [self.MOST_INTERCEPT] * k_max
        self.box = torch.tensor(box, dtype=torch.float64)
        self.served = torch.empty(0)  # the parameters that `judge` reads, from `_prepare`
        self.forget()

    def forget(self) -> None:
        """Reset to the initial state; call `start` next."""
        size, self.rounds = len(self.box), 0
        self.own = torch.zeros(1, size, dtype=torch.float64)  # θ_t of each known tenant
        self.pooled = torch.zeros(size, dtype=torch.float64)  # θ
        # `fresh`: since the last step. `sums`: all remembered rounds, with the right side of the equation above.
        self.fresh, self.sums = (NewtonSums.zeros(1, size - self.shared, self.shared, self.own) for _ in range(2))
        self.places: dict[str, int] = {}  # index of each tenant, the one named longest ago first
        self.tenants = torch.zeros(0, dtype=torch.long)  # (batch,) index of each row's tenant
        self.tokens: list[Token] = []  # of this round, one per depth
        self.pending: list[
            JudgedRound
        ] = []  # not in `fresh` yet: single rounds are too small to be worth the operations

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """Begin a batch of unnamed rows. Keeps what was learnt."""
        self._sum_up()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        for name in ("box", "own", "pooled", "fresh", "sums", "normal"):
            setattr(self, name, getattr(self, name).to(device, dtype))
        self.tenants = torch.full((batch,), ANONYMOUS, device=device)
        self.tokens = []
        self._prepare()

    def admit(self, rows: Tensor) -> None:
        """These rows, (n,) int, hold new sequences of unnamed tenants."""
        self.tenants = self.tenants.index_fill(0, rows, ANONYMOUS)

    def select(self, rows: Tensor) -> None:
        """From now on row i is what row rows[i] was. rows: (m,) int."""
        self.tenants = self.tenants[rows]
        self.tokens = [
            Token(z[rows], *[None if each is None else each[rows] for each in others]) for z, *others in self.tokens
        ]

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        """Name the tenants of these rows, (n,) int. Call it after `admit`, which makes rows unnamed."""
        places = torch.tensor([self._place(key) for key in keys], device=self.tenants.device)
        self.tenants = self.tenants.index_copy(0, rows, places)

    def _place(self, key: str) -> int:
        place = self.places.pop(key, None)
        if place is None:
            self._sum_up()
            if len(self.places) < self.TENANTS - 1:
                place = len(self.own)
                self.own = torch.cat([self.own, torch.zeros_like(self.own[:1])])
                self.fresh, self.sums = self.fresh.with_one_more(), self.sums.with_one_more()
            else:
                place = self.places.pop(next(iter(self.places)))
                self.own[place] = 0
                self.fresh.forget(place)
                self.sums.forget(place)
        self.places[key] = place
        return place

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self) -> None:
        self.tokens = []
        if self.per_tenant:
            self._prepare()

    def _prepare(self) -> None:
        """Put the parameters that `judge` reads in one tensor, () or (batch,) each: s; weights of the raw signals; v; b
        of each depth to use with signals; b of each depth to use without."""
        theta = (self.own[self.tenants] if self.per_tenant else self.pooled).float()
        mean, deviation = self.normal.float()
        weights, plain = theta[..., 1 : self.signals] / deviation, theta[..., self.shared :]
        intercepts = plain - (weights * mean).sum(-1, keepdim=True)
        last_layer = theta[..., self.signals : self.shared]
        self.served = torch.cat([theta[..., :1].exp(), weights, last_layer, intercepts, plain], dim=-1)

    def judge(self, probability: Tensor, signals: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """P̂ → P̂' of the next depth's tokens, (batch,) each. Call it once a depth, in order. signals: (batch, signals),
        not normalised. state: (batch, state), of length 1."""
        z, served = torch.logit(probability.float()), self.served
        corrected = torch.addcmul(served[..., self.shared + len(self.tokens)], served[..., 0], z)
        for values, first, last in ((signals, 1, self.signals), (state, self.signals, self.shared)):
            if first < last:
                weights = served[..., first:last]
                assert values is not None
                corrected = corrected + self._weighed(values.float(), weights)
        self.tokens.append(Token(z, signals, state))
        return torch.sigmoid(corrected)

    def _weighed(self, values: Tensor, weights: Tensor) -> Tensor:
        return (values * weights).sum(-1) if self.per_tenant else values @ weights

    def look_ahead(self, probability: Tensor) -> Tensor:
        """β̂ → β̂' of the tokens after those judged last, (batch,) each. Uses s and b alone, as their signals are
        unknown. Nothing is learnt from β̂."""
        depths = len(self.box) - self.shared
        plain = self.shared + depths + min(len(self.tokens), depths - 1)
        logit = torch.logit(probability.float())
        return torch.sigmoid(torch.addcmul(self.served[..., plain], self.served[..., 0], logit))

    def corrected(self, logit: Tensor, depth: Tensor, signals: Tensor | None = None) -> Tensor:
        """Corrected logits, (n,), of tokens at depths (n,) int, by s, u and b of the pooled θ, without v.
        Differentiable in `logit`. signals: (n, signals), not normalised."""
        theta = self.pooled.to(torch.float32, copy=True)  # the copy is not an inference-mode tensor
        moved = torch.addcmul(theta[self.shared :][depth], theta[0].exp(), logit)
        if self.signals > 1:
            assert signals is not None
            mean, deviation = self.normal.float()
            moved = moved + ((signals - mean) / deviation) @ theta[1 : self.signals]
        return moved

    # --- learning, at the end of a round -----------------------------------------------------------------------------

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from the round whose tokens were judged last."""
        tokens, self.tokens = self.tokens, []
        if not self.learning:
            return
        if tokens:  # copies: the host may overwrite its tensors in the next round
            judged = torch.where(outcome.live, outcome.judged, 0)
            z, signals, state = (
                None if parts[0] is None else torch.stack(parts)  # all depths have it, or none
                for parts in zip(*tokens, strict=True)
            )
            assert z is not None
            rest = Token(z, signals, state), self.tenants, judged, outcome.labels(len(tokens))
            self.pending.append(JudgedRound(len(tokens), *rest))
        self.rounds += 1
        if self.rounds % self.INTERVAL == 0:
            self._step()

    def _sum_up(self) -> None:
        """Add the pending rounds' tokens to `fresh`."""
        rounds, self.pending = self.pending, []
        if not rounds:
            return
        seen = gathered(rounds, self.normal, len(self.box) - self.shared, self.own.dtype)
        x, label, counts, tenant, depth = seen
        own = self.own[tenant]
        intercept = own.gather(1, self.shared + depth[:, None])[:, 0]
        p = torch.sigmoid(x[:, 0] + (x * self._moved(own)).sum(-1) + intercept)
        self.fresh.add(x, p, label, counts, tenant, depth)

    def _step(self) -> None:
        self._sum_up()
        remembered = 2 ** (-self.INTERVAL / self.half_life)
        self.sums.remember(remembered, self.fresh, self._moved(self.own), self.own[:, self.shared :])
        self.fresh = NewtonSums.zeros(len(self.own), len(self.box) - self.shared, self.shared, self.own)
        self.own = self._towards(self.own, self._optimum())
        votes = self.sums.labels.clamp(max=self.VOTES)
        share = votes / votes.sum().clamp(min=self.VOTES / self.tenant_share)
        self.pooled = self._towards(self.pooled, share @ self.own)
        self._prepare()

    def _optimum(self) -> Tensor:
        """(tenants, …) the θ_t at the optimum of the sums."""
        slopes, intercepts = self.sums.optimum(self.prior)
        log_slope = (1 + slopes[:, :1]).clamp(min=math.exp(-self.MOST_SLOPE)).log()
        return torch.cat([log_slope, slopes[:, 1:], intercepts], dim=-1)

    def _moved(self, theta: Tensor) -> Tensor:
        """(…, shared) s − 1, u and v."""
        return torch.cat([theta[..., :1].exp() - 1, theta[..., 1 : self.shared]], dim=-1)

    def _towards(self, theta: Tensor, target: Tensor) -> Tensor:
        moved = theta + (target - theta).clamp(-self.STEP, self.STEP).nan_to_num()
        moved = moved.clamp(-self.box, self.box)
        if self.state:
            v, wanted = (each[..., self.signals : self.shared] for each in (theta, target))
            wanted = wanted * (self.MOST_STATE / wanted.norm(dim=-1, keepdim=True)).clamp(max=1)
            moved[..., self.signals : self.shared] = v + self.FOLLOWS * (wanted - v).nan_to_num()
        return moved

    # --- saving ------------------------------------------------------------------------------------------------------

    def learnt(self) -> DepthCalibration:
        """The pooled correction, in a form that can be saved beside the head. Waits for the device. Raises InputError
        when the correction also uses signals or the head's state."""
        if self.shared > 1:
            raise InputError(
                "what was learnt of draft signals or of the head's state is not a calibration by depth: expected "
                "signals=false and state=false"
            )
        log_slope, *intercepts = self.pooled.tolist()
        slopes = [math.exp(log_slope)] * len(intercepts)
        return DepthCalibration(method="affine", slopes=tuple(slopes), intercepts=tuple(intercepts))
