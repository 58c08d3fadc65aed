"""A head whose probabilities are corrected by a calibration fitted beforehand, and online by verification."""

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

MOST_CHANNELS = 256  # of the head's state in the online fit, whose time grows with their cube


def unit_state(head: AcceptanceHead) -> Callable[[Tensor], Tensor]:
    """A function that scales the head's last state, (n, channels), to length 1 → (n, at most MOST_CHANNELS). A wider
    state is projected first, by a fixed random projection that keeps lengths and angles on average."""
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
    """A head's rule on a corrected probability P̂'. `predicted` holds P̂'.

    calibration: maps by depth, applied first. online: then apply OnlineRecalibration, which learns while decoding. It
    learns a slope and intercepts; with `signals` also weights of the draft signals that the head reads; with `state`
    also a correction of the head's last layer. half_life, prior, tenant_share, per_tenant: of OnlineRecalibration.
    train: instead of the last layer's correction, train the whole head by OnlineTraining. This is for trusted traffic
    only, as the influence of one tenant is not bounded. β̂ of the rule `gain` is corrected like P̂ of the depth that it
    predicts.

    recalibration.learning = False freezes what was learnt; recalibration.learnt().save(folder) saves it for use as
    `calibration`. Rows can belong to tenants, see `set_tenants`.

    Lossless like the head's rule: what is learnt from a round affects later rounds only.
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
        self.state: Tensor | None = None  # the head's last state of the same token
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
    def capture(self) -> Capture | None:  # type: ignore[override]
        """None if the head itself changes, or if the correction depends on the row's tenant."""
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
        if step.scored is not None:  # then `score` does not read the signals
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
            inputs = None if self.seen is None else self.head.signal_inputs(self.seen)
            token = self.recalibration.judge(token, inputs, self.state)
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
