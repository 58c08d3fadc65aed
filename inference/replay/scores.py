"""A threshold rule's scores of every token that any round could draft, in coupled traces."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal
from accept_head.inference.replay.coupled import CoupledTraces

HIDDEN = frozenset({Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN})


@torch.no_grad()
def score_tokens(traces: CoupledTraces, policy: ThresholdPolicy, floor: float = -float("inf")) -> Tensor:
    """The policy's score of every token, (M,) float32; P̂ and β̂, (M, 2), if it `predicts_next`.

    floor: the lowest level of interest. A rollout token gets the score 0 if every round that reaches it has a statistic
    below the floor. A round that drafts it, forced by k_min, is below all levels already and cannot rise again.
    """
    device, numbers = _device_of(policy), (2,) if policy.predicts_next else ()
    if not policy.reads & HIDDEN:
        return policy.score(draft_step(traces, slice(None), device)).float().cpu()
    on = torch.zeros(traces.of_responses, *numbers)
    off = torch.zeros(len(traces.rejected), traces.k_max - 1, *numbers)
    for positions, rollouts, fed, hidden in traces.hidden():
        fed, hidden = fed.to(device), hidden.to(device)
        rejected = (traces.rejected[rollouts] - positions.start).to(device)
        on[positions] = policy.score(_on_path(traces, positions, fed, hidden, rejected)).float().cpu()
        _score_rollouts(traces, policy, rollouts, hidden, on[traces.rejected[rollouts]], off[rollouts], floor)
    return torch.cat([on, off.flatten(0, 1)])


def _score_rollouts(
    traces: CoupledTraces,
    policy: ThresholdPolicy,
    rollouts: slice,
    hidden: Tensor,
    rejected: Tensor,
    out: Tensor,
    floor: float,
) -> None:
    """Fill `out`, (rollouts, k_max − 1), token by token, while the running statistic is at least `floor`. rejected:
    (rollouts,) the score of the rejected token before each rollout. The statistic starts there; it is lower still in
    rounds that began earlier."""
    lengths, steps = traces.rollout_lengths[rollouts], traces.k_max - 1
    survival, running = policy.follow(*policy.begin(lengths.shape, rejected.device), rejected)
    numbers = torch.arange(rollouts.start, rollouts.stop)
    for slot in range(steps):
        alive = torch.where((running >= floor) & (slot < lengths))[0]
        if not len(alive):
            return
        if Signal.DRAWN_HIDDEN in policy.reads and slot == steps - 1:
            out[alive, slot] = 1.0  # last token of the longest round: nothing depends on it
            return
        tokens = traces.of_responses + numbers[alive] * steps + slot
        rows = alive.to(hidden.device)
        drawn = hidden[rows, slot + 1] if slot + 1 < steps else None
        score = policy.score(draft_step(traces, tokens, hidden.device, hidden[rows, slot], drawn)).float().cpu()
        out[alive, slot] = score
        survival[alive], running[alive] = policy.follow(survival[alive], running[alive], score)


def _on_path(traces: CoupledTraces, positions: slice, fed: Tensor, hidden: Tensor, rejected: Tensor) -> DraftStep:
    """The tokens of a shard's positions, as one draft step. The state at an accepted token is the state that the next
    token of the round is drawn from. At a response's end the state is arbitrary, as nothing reads it."""
    drawn = fed.roll(-traces.following, 0)
    drawn[rejected] = hidden[:, 0]
    return draft_step(traces, positions, fed.device, fed, drawn)


def draft_step(
    traces: CoupledTraces,
    tokens: slice | Tensor,
    device: torch.device,
    fed: Tensor | None = None,
    drawn: Tensor | None = None,
) -> DraftStep:
    """Tokens as one draft step, for ThresholdPolicy.score."""
    ids = traces.ids[tokens].to(device)
    return DraftStep(
        depth=0,
        token_ids=ids,
        active=torch.ones_like(ids, dtype=torch.bool),
        fed_hidden=fed,
        drawn_hidden=drawn,
        logprob=traces.logprob[tokens].to(device),
        entropy=traces.entropy[tokens].to(device),
        max_prob=traces.max_prob[tokens].to(device),
    )


def _device_of(policy: ThresholdPolicy) -> torch.device:
    head = getattr(policy, "head", None)
    return next(head.parameters()).device if head is not None else torch.device("cpu")
