"""A head whose probabilities are corrected, by a calibration fitted beforehand, and by what verification says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accept_head.calibration import DepthCalibration
from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.scorer import Score
from accept_head.inference.engine.capture import Capture
from accept_head.inference.kernels.head import scorer_of
from accept_head.inference.policies.head import HeadPolicy, Rule
from accept_head.inference.policies.online.recalibration import OnlineRecalibration
from accept_head.inference.policies.online.training import OnlineTraining
from accept_head.inference.policy import DraftStep, Signal, VerifyOutcome, constant_budget

MOST_CHANNELS = 256  # of the head's state that are learnt from: a fit takes their cube


def unit_state(head: AcceptanceHead) -> Callable[[Tensor], Tensor]:
    """The head's last state, (n, channels) → (n, at most MOST_CHANNELS), scaled to length 1. Of a wider head it is a
    random projection, always the same one, which keeps lengths and angles on average."""
    channels, device = head.config.channels, head.device
    projection = None
    if channels > MOST_CHANNELS:
        drawn = torch.randn(channels, MOST_CHANNELS, generator=torch.Generator().manual_seed(0))
        projection = torch.linalg.qr(drawn).Q.to(device, head.dtype)

    def unit(x: Tensor) -> Tensor:
        if projection is not None:
            x = x @ projection
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)

    return unit


class RecalibratedHeadPolicy(HeadPolicy):
    """A head's rule on P̂', not P̂: after the maps of `calibration`, by depth, and then, if `online`, what
    OnlineRecalibration learns while it decodes: a slope, intercepts and, with `signals`, weights of the draft signals
    that the head reads, and, with `state`, a correction of its last layer. half_life, prior, tenant_share, per_tenant:
    its own. With `train` the whole head learns on, by OnlineTraining, in place of that last layer: for traffic that is
    trusted, as what one tenant teaches it is not bounded.
    β̂ of the rule `gain` is corrected as P̂ of the depth that it speaks of. `predicted` is what is decided on, P̂'.

    recalibration.learning = False freezes what was learnt; recalibration.learnt().save(folder) keeps it, to be used as
    `calibration`. Rows can be told apart by tenants, see `set_tenants`.

    Lossless, as the head's: what is learnt of a round decides on later ones.
    """

    by_depth = True

    def __init__(
        self,
        head: AcceptanceHead,
        threshold: float,
        *,
        k_min: int = 1,
        k_max: int = 20,
        lag: int | None = None,
        rule: Rule | None = None,
        calibration: DepthCalibration | bool = False,
        online: bool = False,
        signals: bool = True,
        state: bool = True,
        train: bool = False,
        half_life: float = 1000.0,
        prior: float = 4.0,
        tenant_share: float = 1.0,
        per_tenant: bool = False,
    ):
        if calibration is True:
            raise InputError("head calibration is true, expected a DepthCalibration; a SPEC reads calibration.json")
        if train and (not online or per_tenant or tenant_share < 1):
            raise InputError(
                "head train is true, which goes with online=true, and without per_tenant and tenant_share: all tenants "
                "teach one head, and how much is not bounded"
            )
        if train and calibration:
            raise InputError(
                "head train is true, and calibration, too: its maps are of the head as it is, expected one of both"
            )
        self.training = OnlineTraining(head) if train else None
        self.learns_state = online and state and not train and head.config.residual
        super().__init__(head, threshold, k_min=k_min, k_max=k_max, lag=lag, rule=rule)
        self.calibration = calibration or None
        learns_signals = signals and bool(head.config.signals)
        self.seen: Tensor | None = None  # signals of the token judged last
        self.state: Tensor | None = None  # and the head's own last state of it
        self.recalibration = (
            OnlineRecalibration(
                k_max,
                signals=(head.config.signal_mean, head.config.signal_std) if learns_signals else ((), ()),
                state=min(head.config.channels, MOST_CHANNELS) if self.learns_state else 0,
                half_life=half_life,
                prior=prior,
                tenant_share=tenant_share,
                per_tenant=per_tenant,
            )
            if online
            else None
        )
        if online:
            self.needs |= {Signal.ACCEPTANCE}
        if self.training is not None and self.training.judges_alternatives:
            self.needs |= {Signal.ALTERNATIVES}

    def _scorer(self, head: AcceptanceHead) -> Score:
        if self.training is not None:
            return self.training.score
        if not self.learns_state:
            return super()._scorer(head)
        return scorer_of(head, "both" if self.predicts_next else "token", unit_state(head))

    @property
    def in_chunks(self) -> bool:  # type: ignore[override]
        """Not if it learns with a lag: it would be shown the state at the last token of a round, too, and learn from a
        token that it does not judge otherwise. Nor if the head trains, whose memory such tokens would fill sooner."""
        return self.recalibration is None or (self.lag == 0 and self.training is None)

    @property
    def capture(self) -> Capture | None:  # type: ignore[override]
        """None if the head itself changes, or rows are corrected by what their tenants are."""
        online = self.recalibration
        if self.training is not None or (online is not None and online.per_tenant):
            return None
        carried = HeadPolicy.capture.carried if HeadPolicy.capture else ()
        from_score_to_correction = ("seen", "state")
        if online is None:
            return Capture(carried=carried, unread=from_score_to_correction)
        return Capture(
            carried=(*carried, "recalibration.tokens"), read=("recalibration.served",), unread=from_score_to_correction
        )

    def forget(self) -> None:
        if self.recalibration is not None:
            self.recalibration.forget()

    def _signals_of(self, step: DraftStep) -> Tensor | None:
        self.seen = super()._signals_of(step)
        return self.seen

    def score(self, step: DraftStep) -> Tensor:
        if step.scored is not None:  # they were not asked for
            self._signals_of(step)
        score = super().score(step)
        if self.recalibration is None or not self.recalibration.state:
            return score
        predictions = 2 if self.predicts_next else 1
        self.state = score[..., predictions:]
        return score[..., :predictions] if self.predicts_next else score[..., 0]

    def _add(self, score: Tensor) -> None:
        depth = len(self.predicted) + 1
        token, *following = score.unbind(-1) if self.predicts_next else (score,)
        if self.calibration is not None:
            token, *following = (self.calibration(depth + i, p) for i, p in enumerate((token, *following)))
        if self.recalibration is not None:
            told = None if self.seen is None else self.head.signal_inputs(self.seen)
            token = self.recalibration.judge(token, told, self.state)
            following = [self.recalibration.look_ahead(p) for p in following]
        super()._add(torch.stack([token, *following], dim=-1) if following else token)

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        if self.recalibration is not None:
            self.recalibration.start(batch, device)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        if self.recalibration is not None:
            self.recalibration.admit(rows)

    @property
    def by_tenant(self) -> bool:
        online = self.recalibration
        return online is not None and (online.per_tenant or online.tenant_share < 1)

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        if self.recalibration is not None:
            self.recalibration.set_tenants(rows, keys)

    def select(self, rows: Tensor) -> None:
        if self.recalibration is not None:
            self.recalibration.select(rows)
        if self.training is not None:
            self.training.forget_round()

    # --- rounds ------------------------------------------------------------------------------------------------------

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        if self.recalibration is not None:
            self.recalibration.start_round()
        if self.training is not None:
            self.training.start_round(self.recalibration is not None and self.recalibration.learning)
        return super().start_round(live)

    def observe(self, outcome: VerifyOutcome) -> None:
        if self.recalibration is not None:
            self.recalibration.observe(outcome)
            if self.training is not None and self.recalibration.learning:
                self.training.observe(outcome, self.recalibration)
