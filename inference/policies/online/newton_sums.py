"""Sums over tokens for a logistic fit of each tenant, with slopes shared by all depths and an intercept per depth.

XᵀWX·Δ = right side    X: x, and a column per depth; W = p·(1 − p); right side: Xᵀ(label − p) before `remember`
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class NewtonSums:
    """The sums. gram: (tenants, f, f) Σ w·xxᵀ. cross: (tenants, depths, f) Σ w·x. one: (tenants, depths) Σ w. right_x:
    (tenants, f) and right: (tenants, depths) the right side. labels: (tenants,) number of tokens."""

    gram: Tensor
    cross: Tensor
    one: Tensor
    right_x: Tensor
    right: Tensor
    labels: Tensor

    @classmethod
    def zeros(cls, tenants: int, depths: int, f: int, like: Tensor) -> NewtonSums:
        """Zero sums on the device and in the dtype of `like`."""
        shapes = (f, f), (depths, f), (depths,), (f,), (depths,), ()
        return cls(*[like.new_zeros(tenants, *shape) for shape in shapes])

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (getattr(self, field.name) for field in fields(self))

    def to(self, device: torch.device, dtype: torch.dtype) -> NewtonSums:
        return NewtonSums(*[part.to(device, dtype) for part in self])

    def with_one_more(self) -> NewtonSums:
        """The sums with room for another tenant."""
        return NewtonSums(*[torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in self])

    def forget(self, tenant: int) -> None:
        for part in self:
            part[tenant] = 0

    def add(self, x: Tensor, p: Tensor, label: Tensor, judged: Tensor, tenant: Tensor, depth: Tensor) -> None:
        """Add tokens. x: (n, f), 0 where not judged; p, label: (n,); judged: (n,) bool; tenant, depth: (n,) int."""
        w, residual, judged = p * (1 - p) * judged, (label - p) * judged, judged.to(x.dtype)
        cell = tenant * self.one.shape[1] + depth
        self.cross.view(-1, x.shape[1]).index_add_(0, cell, w[:, None] * x)
        self.one.view(-1).index_add_(0, cell, w)
        self.right_x.index_add_(0, tenant, residual[:, None] * x)
        self.right.view(-1).index_add_(0, cell, residual)
        self.labels.index_add_(0, tenant, judged)
        for each in range(len(self.gram)):  # a product per tenant: outer products of all tokens would take n·f² numbers
            self.gram[each].addmm_((x * (w * (tenant == each))[:, None]).t(), x)

    def remember(self, share: float, fresh: NewtonSums, slopes: Tensor, intercepts: Tensor) -> None:
        """Multiply these sums by `share` and add fresh ones. slopes, intercepts: the parameters of the fresh sums,
        (tenants, f) and (tenants, depths). With them the right side's solution Δ is the parameters themselves, not a
        step."""
        right_x = (
            fresh.right_x + (fresh.gram @ slopes[..., None])[..., 0] + (fresh.cross * intercepts[..., None]).sum(1)
        )
        right = fresh.right + (fresh.cross * slopes[:, None]).sum(-1) + fresh.one * intercepts
        for mine, new in zip(self, (fresh.gram, fresh.cross, fresh.one, right_x, right, fresh.labels), strict=True):
            mine.mul_(share).add_(new)

    def optimum(self, prior: float) -> tuple[Tensor, Tensor]:
        """The solution of (XᵀWX + prior·1)·Δ = right side: (tenants, f) slopes and (tenants, depths) intercepts. NaN
        without a prior where there is no token."""
        diagonal = torch.eye(self.gram.shape[-1], dtype=torch.bool, device=self.gram.device)
        gram, one = torch.where(diagonal, self.gram + prior, self.gram), self.one + prior
        slopes = arrowhead_slopes(gram, self.cross, one, self.right_x, self.right)
        return slopes, (self.right - (self.cross * slopes[:, None]).sum(-1)) / one


def arrowhead_slopes(gram: Tensor, cross: Tensor, one: Tensor, right_x: Tensor, right: Tensor) -> Tensor:
    """The slopes, (…, f), in the solution of XᵀWX·Δ = right side. The depths share only the slopes, so the matrix is an
    arrowhead. Eliminating the intercepts, (right − cross·slopes) / one, leaves f equations.

    gram: (…, f, f) and right_x: (…, f), summed over depths. cross: (…, depths, f). one, right: (…, depths). There is no
    sync, so a singular matrix gives NaN, not an error.
    """
    scaled = (cross / one[..., None]).transpose(-1, -2)
    left = gram - scaled @ cross
    return torch.linalg.solve_ex(left, right_x - (scaled @ right[..., None])[..., 0]).result
