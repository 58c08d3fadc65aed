"""A head's base, learnt while serving, without traces. Before anything is learnt, a token's P̂ is its q(Y)."""

from __future__ import annotations

import torch

from accept_head.base import BASE_FUNCTIONS
from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.spec import Tuning, named, number
from accept_head.signals import SIGNALS

# Typical means and deviations of BASE_FUNCTIONS on two pairs, a published and the embedded one. The bounds and the
# prior of the fit hold on this scale.
MEAN = (-1.5, 1.5, 0.6, 0.5, 1.0, 2.0, 1.0, -6.0, -1.0)
DEVIATION = (2.0, 1.5, 0.3, 0.35, 4.0, 3.0, 0.6, 8.0, 2.0)


def prior_base() -> AcceptanceHead:
    """A head with P̂ = q(Y)."""
    head = AcceptanceHead(
        HeadConfig(
            hidden_size=1,  # of the states, which it does not read
            depth=0,
            reads="before",
            signals=SIGNALS,
            signal_mean=MEAN,
            signal_std=DEVIATION,
            base=True,
            residual=False,
        )
    )
    place = list(BASE_FUNCTIONS).index("logit q")
    with torch.no_grad():
        head.base.weight.zero_()
        head.base.weight[0, place] = DEVIATION[place]
        head.base.bias.fill_(MEAN[place])
    return head.eval()


@named(
    "online-signals",
    "[THRESHOLD]",
    "a head's base, learnt while serving with no traces, stop as a head does",
    build=lambda argument, draft, options: OnlineSignalsPolicy(
        number(argument) if argument else 0.5, draft.device, **options
    ),
    tuning=Tuning(param="threshold", values=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
)
class OnlineSignalsPolicy(RecalibratedHeadPolicy):
    """A head's rule on P̂(Y accepted), which OnlineRecalibration fits from q(Y) and the inputs of a base. In some
    hundred rounds it comes close to a base fitted to traces. The options are among those of `head` with online=true."""

    def __init__(
        self,
        threshold: float = 0.5,
        device: torch.device | None = None,
        *,
        k_min: int = 1,
        k_max: int = 20,
        half_life: float = 1000.0,
        prior: float = 4.0,
        tenant_share: float = 1.0,
        per_tenant: bool = False,
    ):
        super().__init__(
            prior_base().to(device or "cpu"),
            threshold,
            k_min=k_min,
            k_max=k_max,
            online=True,
            half_life=half_life,
            prior=prior,
            tenant_share=tenant_share,
            per_tenant=per_tenant,
        )
