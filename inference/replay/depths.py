"""Rollouts for a drafter that reads the target's states: what it says at a position depends on where the round began.

Every round has its own: it is drafted again from its start, with the tokens of the response up to its first rejection,
and the drafter's own draws from there. The states of the tokens before come from `unroll`, for all rounds at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.eagle3.unroll import unroll
from accept_head.inference.engine.cache import CachedModel, Group
from accept_head.inference.replay.rollouts import draw_with_signals
from accept_head.randomness import TraceStream, uniforms
from accept_head.trace.config import TraceConfig


def states_by_depth(
    drafter: Eagle3Drafter, text: Tensor, states: Tensor, prompt: int, depths: int
) -> tuple[Tensor, Tensor]:
    """(hidden, own) of a response: hidden is (n, depths, hidden), the state that a token is drawn from at each position
    and depth; own is (n, hidden), the drafter's own output there at depth 1.

    text: (prompt + n,) ids, a prompt of at least two. states: (≥ prompt + n − 2, hidden), the target's at x_0, x_1, …,
    projected. At depth d of position j < d − 1 stands depth j + 1.
    """
    slots = len(text) - 2  # slot i takes x_{i+1} and predicts x_{i+2}
    asked = torch.arange(prompt - 2, slots, device=text.device)  # those of the response's positions
    steps = list(unroll(drafter, text[None, 1:-1], states[None, :slots], depths, asked[None]))
    place = torch.arange(len(asked), device=text.device)[:, None]
    depth = torch.minimum(torch.arange(depths, device=text.device), place)
    return torch.stack([step.hidden[0] for step in steps])[depth, place], steps[0].own[0]


def leading_accepted(accepted: Tensor, last: Tensor) -> Tensor:
    """(P,) how many tokens of a round from each position are accepted before the first that is not, at most depths.

    accepted: (P, depths) bool. last: (P,) the last position that a round from here may draft.
    """
    positions, depths = accepted.shape
    depth = torch.arange(depths, device=accepted.device)
    at = torch.arange(positions, device=accepted.device)[:, None] + depth
    on_path = accepted[at.clamp(max=positions - 1), depth] & (at <= last[:, None])
    return on_path.long().cumprod(-1).sum(-1)


def roll_out_rounds(
    drafter: Eagle3Drafter,
    text: Tensor,
    states: Tensor,
    own: Tensor,
    accepted: Tensor,
    draft_ids: Tensor,
    config: TraceConfig,
    index: int,
) -> dict[str, Tensor]:
    """The tables of `roll_out_records` for one response, but `fed_hidden`. position: the rejected token's place among
    the n × depths tokens of the response. A rollout belongs to one round.

    text, states, own: as for `states_by_depth`. accepted, draft_ids: (n, depths). index: of the prompt.
    """
    count, depths = accepted.shape
    device, prompt = text.device, len(text) - count
    last = torch.full((count,), min(count, config.max_new_tokens - 1) - 1, device=device)
    leading = leading_accepted(accepted, last)
    start = torch.where(leading < torch.minimum(last - torch.arange(count, device=device) + 1, torch.tensor(depths)))[0]
    leading = leading[start]
    step = start + leading  # the position of the rejected token
    budget = torch.minimum(config.max_new_tokens - 2 - step, depths - 1 - leading)
    rejected = draft_ids[step, leading]

    trunk = CachedModel(drafter, 1, len(text) + depths)
    whole = Group(torch.tensor([[0, 0, len(text) - 2]], device=device), len(text) - 2, 0)
    trunk.fill_drafter(text[None, 1:], whole, states[None, : len(text) - 2])
    model = trunk.copy(torch.zeros_like(start))
    rows, slots = len(start), depths - 1
    random = uniforms(config.seed, index, step[:, None], TraceStream.ROLLOUT, torch.arange(slots, device=device))
    tables = _tables(rows, slots, drafter, device)
    own, drawn = own[start, None], rejected
    active, length = torch.ones_like(start, dtype=torch.bool), torch.zeros_like(start)
    for depth in range(1, depths if rows else 1):
        off = depth - leading - 1  # the place in the rollout of the token that follows
        known = text[(prompt + start + depth - 1).clamp(max=len(text) - 1)]
        fed = torch.where(off < 0, known, torch.where(off == 0, rejected, drawn))
        place = prompt + start + depth - 2
        output = model.forward(fed[:, None], place, len(text) + depth - 2, states=own)
        assert output.own is not None
        own, here = output.own, torch.where(off >= 0)[0]
        active[here] &= ((off < budget) & ~torch.isin(fed, torch.tensor(config.end_token_ids, device=device)))[here]
        uniform = random.gather(1, off.clamp(min=0)[:, None])[:, 0]
        drawn, signals = draw_with_signals(output.logits[:, 0], uniform, config.sampling)
        drawn = drafter.drafted_ids[drawn]
        found = {"ids": drawn.int(), "hidden": output.hidden[:, 0]}
        found |= dict(zip(("logprob", "entropy", "max_prob"), signals.unbind(-1), strict=True))
        for name, values in found.items():
            tables[name][here, off[here]] = values[here].to(tables[name].dtype)
        length += active & (off >= 0)
    tables |= {"position": step * depths + leading, "length": length}
    return {name: table.cpu() for name, table in tables.items()}


def _tables(rows: int, slots: int, drafter: Eagle3Drafter, device: torch.device) -> dict[str, Tensor]:
    size, width = (rows, slots), drafter.config.hidden_size
    numbers = {name: torch.zeros(size, device=device) for name in ("logprob", "entropy", "max_prob")}
    ids = torch.zeros(size, dtype=torch.int32, device=device)
    return {"ids": ids, "hidden": torch.zeros(*size, width, dtype=drafter.dtype, device=device), **numbers}


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tables of several responses, one after the other. Each has `fed_hidden`, (n × depths, hidden), too."""
    first, moved = 0, []
    for part in parts:
        moved.append(part | {"position": part["position"] + first})
        first += len(part["fed_hidden"])
    return {name: torch.cat([part[name] for part in moved]).contiguous() for name in parts[0]}
