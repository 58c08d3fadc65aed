"""The loop's bookkeeping: a round's random numbers, the last tokens of each row, and the updates after a round.

In torch this takes a hundred operations per round and a dozen per drafted token, on a few numbers per row. On a GPU
each operation takes two microseconds. Here each step is one kernel. Kernels and torch give the same numbers to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.inference.kernels.launch import power_of_two, triton_kernels
from accept_head.inference.kernels.usable import Check, usable
from accept_head.randomness import seed_state, uniforms


class RowState(NamedTuple):
    """The state of a batch's rows, on the device. A round changes it in place.

    tokens: (batch, columns). All others are (batch,). lengths, max_lengths: tokens of each row, and how many it may
    have. fed: tokens that the draft was fed. live: whether the row continues. rounds to draft_forwards: counts so far.
    round_accepted: accepted tokens of the last round.
    """

    tokens: Tensor
    lengths: Tensor
    max_lengths: Tensor
    fed: Tensor
    live: Tensor
    rounds: Tensor
    drafted: Tensor
    submitted: Tensor
    accepted: Tensor
    draft_forwards: Tensor
    round_accepted: Tensor


class RoundCounts(NamedTuple):
    """Results of a round, (batch,) each.

    verified, next_ids: number of accepted candidates, and the token after them. drafted: tokens that the row drew.
    extra_forwards: draft forwards beyond one per drawn token. submitted: tokens that were verified.
    """

    verified: Tensor
    next_ids: Tensor
    drafted: Tensor
    extra_forwards: Tensor
    submitted: Tensor


class Accepted(NamedTuple):
    """Rows after a round, (batch,) each: tokens that count as accepted, which rows took part, their new lengths."""

    accepted: Tensor
    live: Tensor
    lengths: Tensor


# --- a round's random numbers ----------------------------------------------------------------------------------------


def write_uniforms(out: Tensor, keys: Tensor, rounds: Tensor, seed: int, slots: int) -> None:
    """Write the first `slots` random numbers of this round for each purpose.

    out: (batch, purposes, ≥ slots). keys, rounds: (batch,).
    """
    if usable(out, CHECK):
        write_uniforms_by_kernel(out, keys, rounds, seed, slots)
    else:
        write_uniforms_in_torch(out, keys, rounds, seed, slots)


def write_uniforms_in_torch(out: Tensor, keys: Tensor, rounds: Tensor, seed: int, slots: int) -> None:
    slot, purpose = (torch.arange(n, device=keys.device) for n in (slots, out.shape[1]))
    out[..., :slots] = uniforms(seed, keys[:, None, None], rounds[:, None, None], slot, purpose[:, None])


def write_uniforms_by_kernel(out: Tensor, keys: Tensor, rounds: Tensor, seed: int, slots: int) -> None:
    purposes = out.shape[1]
    state = torch.full((1,), seed_state(seed), dtype=torch.int64, device=out.device)
    with torch.cuda.device_of(out):
        triton_kernels("rows").uniform_numbers[(len(out),)](
            out, keys, rounds, state, out.stride(0), out.stride(1), slots,
            PURPOSES=purposes, BLOCK=power_of_two(purposes * slots),
        )  # fmt: skip


# --- the last tokens of each row -------------------------------------------------------------------------------------


def last_tokens(tokens: Tensor, lengths: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    """(batch,), where the last `count` tokens of each row begin, and the tokens from there on, (batch, width).

    Tokens beyond a row's length are arbitrary.
    """
    if usable(tokens, CHECK):
        return last_tokens_by_kernel(tokens, lengths, count, width)
    return last_tokens_in_torch(tokens, lengths, count, width)


def last_tokens_in_torch(tokens: Tensor, lengths: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    starts = (lengths - count).clamp(min=0)
    return starts, _window(tokens, starts, width)


def last_tokens_by_kernel(tokens: Tensor, lengths: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    starts, window = torch.empty_like(lengths), tokens.new_empty(len(lengths), width)
    with torch.cuda.device_of(starts):
        triton_kernels("rows").last_tokens[(len(starts),)](
            tokens, lengths, starts, window, width, tokens.shape[1], count, BLOCK=power_of_two(width)
        )
    return starts, window


def _window(tokens: Tensor, starts: Tensor, width: int) -> Tensor:
    """Tokens of each row from its own start, (batch, width)."""
    index = starts[:, None] + torch.arange(width, device=starts.device)
    return tokens.gather(1, index.clamp(max=tokens.shape[1] - 1))


# --- after a token is drawn ------------------------------------------------------------------------------------------


def write_drawn(
    tokens: Tensor,
    lengths: Tensor,
    depth: int,
    ids: Tensor,
    end_ids: Tensor,
    budget: Tensor,
    active: Tensor,
    drawn: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the `depth`-th drawn token of each row, ids (batch,), after its accepted tokens.

    active, drawn: (batch,), which rows draft, and how many tokens each has drawn. Returns both after this token. A row
    stops at its budget and at an end token.
    """
    given = tokens, lengths, depth, ids, end_ids, budget, active, drawn
    return write_drawn_by_kernel(*given) if usable(tokens, CHECK) else write_drawn_in_torch(*given)


def write_drawn_in_torch(
    tokens: Tensor,
    lengths: Tensor,
    depth: int,
    ids: Tensor,
    end_ids: Tensor,
    budget: Tensor,
    active: Tensor,
    drawn: Tensor,
) -> tuple[Tensor, Tensor]:
    place = (lengths + depth - 1).clamp(max=tokens.shape[1] - 1)
    tokens.scatter_(1, place[:, None], ids[:, None])
    drawn = drawn + active
    return active & ~_is_end(ids, end_ids) & (drawn < budget), drawn


def write_drawn_by_kernel(
    tokens: Tensor,
    lengths: Tensor,
    depth: int,
    ids: Tensor,
    end_ids: Tensor,
    budget: Tensor,
    active: Tensor,
    drawn: Tensor,
) -> tuple[Tensor, Tensor]:
    now_active, now_drawn = torch.empty_like(active), torch.empty_like(drawn)
    with torch.cuda.device_of(ids):
        triton_kernels("rows").after_draw[(len(ids),)](
            tokens, lengths, ids, end_ids, budget, active, drawn, now_active, now_drawn, depth, tokens.shape[1],
            len(end_ids), BLOCK=_block(end_ids),
        )  # fmt: skip
    return now_active, now_drawn


def _is_end(ids: Tensor, end_ids: Tensor) -> Tensor:
    """Which of the ids, (...), are end tokens."""
    # torch.isin would make the host wait for a GPU when there are many end tokens.
    return (ids[..., None] == end_ids).any(-1)


def _block(end_ids: Tensor) -> int:
    return power_of_two(max(1, len(end_ids)))


# --- after a round is verified ---------------------------------------------------------------------------------------


def accept(rows: RowState, counts: RoundCounts, end_ids: Tensor, slots: int, *, any_drawn: bool) -> Accepted:
    """Append the accepted tokens and the next one, cut after an end token. slots: most tokens that a row submitted."""
    given = rows, counts, end_ids, slots, any_drawn
    return accept_by_kernel(*given) if usable(rows.tokens, CHECK) else accept_in_torch(*given)


def accept_in_torch(rows: RowState, counts: RoundCounts, end_ids: Tensor, slots: int, any_drawn: bool) -> Accepted:
    verified, lengths = counts.verified, rows.lengths
    place = (lengths + verified).clamp(max=rows.tokens.shape[1] - 1)
    rows.tokens.scatter_(1, place[:, None], counts.next_ids[:, None])
    emitted = (verified + 1) * rows.live
    ends = _is_end(_window(rows.tokens, lengths, slots + 1), end_ids)
    ends &= torch.arange(slots + 1, device=ends.device) < emitted[:, None]
    ended = ends.any(-1)
    emitted = torch.where(ended, ends.int().argmax(-1) + 1, emitted)
    accepted = torch.minimum(verified, emitted) * rows.live
    if any_drawn:  # the draft was fed all tokens before the last one it drew
        rows.fed.copy_(lengths + torch.minimum(verified, counts.drafted - 1))
    lengths.add_(emitted)
    rows.rounds.add_(rows.live)
    rows.drafted.add_(counts.drafted)
    rows.submitted.add_(counts.submitted)
    rows.accepted.add_(accepted)
    rows.draft_forwards.add_(counts.drafted + counts.extra_forwards)
    rows.round_accepted.copy_(accepted)
    live = rows.live.clone()
    rows.live.logical_and_(~ended & (lengths < rows.max_lengths))
    return Accepted(accepted, live, lengths.clone())


def accept_by_kernel(rows: RowState, counts: RoundCounts, end_ids: Tensor, slots: int, any_drawn: bool) -> Accepted:
    made = Accepted(*(torch.empty_like(each) for each in (rows.lengths, rows.live, rows.lengths)))
    with torch.cuda.device_of(made.accepted):
        triton_kernels("rows").accept[(len(made.accepted),)](
            rows.tokens, rows.lengths, rows.max_lengths, rows.fed, rows.live, end_ids,
            counts.verified, counts.next_ids, counts.drafted, counts.extra_forwards, counts.submitted,
            rows.rounds, rows.drafted, rows.submitted, rows.accepted, rows.draft_forwards,
            rows.round_accepted, *made, slots + 1, rows.tokens.shape[1], len(end_ids),
            DRAFTED=any_drawn, WIDTH=power_of_two(slots + 1), BLOCK=_block(end_ids),
        )  # fmt: skip
    return made


# --- the check -------------------------------------------------------------------------------------------------------

BY_KERNEL = write_uniforms_by_kernel, last_tokens_by_kernel, write_drawn_by_kernel, accept_by_kernel
IN_TORCH = write_uniforms_in_torch, last_tokens_in_torch, write_drawn_in_torch, accept_in_torch


def compare(device: torch.device, batch: int = 9, slots: int = 6, tries: int = 6) -> None:
    """Raises AssertionError when results or updates of the kernels and torch differ."""
    random = torch.Generator().manual_seed(0)

    def numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape or (batch,), generator=random).to(device)

    for number in range(tries):
        end_ids = torch.arange(0, 2 * number, 2, device=device)
        state = RowState(
            tokens=numbers(9, batch, 20 + slots), lengths=1 + numbers(20), max_lengths=10 + numbers(24),
            fed=numbers(3), live=numbers(4) > 0, rounds=numbers(99), drafted=numbers(9), submitted=numbers(9),
            accepted=numbers(9), draft_forwards=numbers(9), round_accepted=numbers(9),
        )  # fmt: skip
        keys, ids, progress = numbers(1 << 62), numbers(9), (numbers(slots), numbers(3) > 0, numbers(slots))
        counts = RoundCounts(numbers(slots), numbers(9), numbers(slots), numbers(2), numbers(slots))
        found = []
        for uniforms_of, last_of, drawn_of, accepted_of in (BY_KERNEL, IN_TORCH):
            rows = RowState(*(each.clone() for each in state))
            random_numbers = torch.zeros(batch, 3, slots - 1, dtype=torch.float64, device=device)
            uniforms_of(random_numbers, keys, rows.rounds, 7, slots - 1)
            said = [random_numbers, *last_of(rows.tokens, rows.lengths, 2, slots - 1)]
            said += drawn_of(rows.tokens, rows.lengths, slots - 1, ids, end_ids, *progress)
            said += accepted_of(rows, counts, end_ids, slots - 1, number % 2 == 1)
            found.append([*said, *rows])
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


CHECK = Check("the loop", compare)
