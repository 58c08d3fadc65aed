"""The arms of a bench: policies by SPEC, always including the target alone and fixed draft lengths.

In a SPEC, `slo_ms=p90` stands for the present cell's limit of time per output token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accept_head.errors import InputError
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.policies.drafting import check_lossless
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import Pair
from accept_head.sampling import Sampling

P90 = "slo_ms=p90"


def arm_names(policies: Sequence[str], fixed: Sequence[int]) -> list[str]:
    """The names of all arms. Raises InputError when a policy is given twice."""
    reference = ["none", *(f"fixed:{k}" for k in fixed)]
    names = [*reference, *(spec for spec in policies if spec not in reference)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"--policy {min(twice)}: given twice")
    return names


def check_all_lossless(
    names: Sequence[str], pair: Pair, verifier: Verifier, samplings: Sequence[Sampling], *, allow_lossy: bool
) -> None:
    """Raises InputError when a policy's SPEC is wrong, or its output would not be the target's."""
    for name in names:
        policy = make_policy(resolved(name, 1.0), pair)
        for sampling in samplings:
            check_lossless(policy, verifier, greedy=sampling.greedy, allow_lossy=allow_lossy)


def arm_maker(name: str, pair: Pair, limit: float = 1.0) -> Callable[[], DraftPolicy]:
    """A function that returns the policy in its initial state.

    A policy whose steps can be captured is made once and reset, so that its captured steps serve all its runs.
    """
    made: list[DraftPolicy] = []

    def make() -> DraftPolicy:
        policy = made[0] if made else make_policy(resolved(name, limit), pair)
        made[:] = [policy] if capture_of(policy) is not None else []
        if made and hasattr(policy, "forget"):
            policy.forget()
        return policy

    return make


def resolved(name: str, limit: float) -> str:
    """The SPEC with `slo_ms=p90` replaced by the limit. limit: seconds per token."""
    return name.replace(P90, f"slo_ms={1e3 * limit:.4f}")
