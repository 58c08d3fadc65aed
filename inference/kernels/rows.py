"""The loop's bookkeeping, one kernel a step, where Triton and a GPU are.

In torch it is a hundred operations a round, and another dozen a drafted token, on a few numbers a row: on a GPU each
takes two microseconds to do next to nothing. Here are four kernels for them. They give the same numbers to the bit:
that is tried once, against torch, before they are used.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accept_head.inference.kernels import signals as fused_signals
from accept_head.inference.kernels.signals import holds, power_of_two
from accept_head.randomness import seed_state

if TYPE_CHECKING:
    from accept_head.inference.decode.drafted import Drafted, Going
    from accept_head.inference.decode.rows import Rows
    from accept_head.inference.decode.stopping import Stopping
    from accept_head.inference.decode.verify import Verified


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can take it, and work on its device. ACCEPT_HEAD_KERNELS=0 in the environment says no."""
    return (tensor.is_cuda or fused_signals.ON_ANY_DEVICE) and fused_signals._triton() and _proven(tensor.device)


def set_uniforms(rows: Rows, seed: int, slots: int) -> None:
    """`slots` random numbers of this round for each purpose of each row."""
    from accept_head.inference.kernels.triton import rows as kernels

    out, purposes = rows.uniforms, rows.uniforms.shape[1]
    state = torch.full((1,), seed_state(seed), dtype=torch.int64, device=out.device)
    with torch.cuda.device_of(out):
        kernels.uniform_numbers[(len(out),)](
            out, rows.keys, rows.rounds, state, out.stride(0), out.stride(1), slots,
            PURPOSES=purposes, BLOCK=power_of_two(purposes * slots),
        )  # fmt: skip


def last(rows: Rows, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """See `Rows.last`."""
    from accept_head.inference.kernels.triton import rows as kernels

    starts, window = torch.empty_like(rows.lengths), rows.tokens.new_empty(len(rows.lengths), width)
    with torch.cuda.device_of(starts):
        kernels.last_tokens[(len(starts),)](
            rows.tokens, rows.lengths, starts, window, width, rows.tokens.shape[1], tokens, BLOCK=power_of_two(width)
        )
    return starts, window


def go_on(rows: Rows, depth: int, ids: Tensor, end_ids: Tensor, going: Going) -> Going:
    """See `Rows.go_on`."""
    from accept_head.inference.kernels.triton import rows as kernels

    active, lengths = torch.empty_like(going.active), torch.empty_like(going.lengths)
    with torch.cuda.device_of(ids):
        kernels.after_draw[(len(ids),)](
            rows.tokens, rows.lengths, ids, end_ids, going.budget, going.active, going.lengths, active, lengths, depth,
            rows.tokens.shape[1], len(end_ids), BLOCK=_block(end_ids),
        )  # fmt: skip
    return going._replace(active=active, lengths=lengths)


def accept(rows: Rows, drafted: Drafted, verified: Verified, end_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `Rows.accept` → (batch,) accepted, which rows were live, and their lengths now."""
    from accept_head.inference.kernels.triton import rows as kernels

    width = drafted.slots + 1
    kept, live, lengths = (torch.empty_like(each) for each in (rows.lengths, rows.live, rows.lengths))
    with torch.cuda.device_of(kept):
        kernels.accept[(len(kept),)](
            rows.tokens, rows.lengths, rows.max_lengths, rows.fed, rows.live, end_ids,
            verified.accepted, verified.next_ids, drafted.lengths, drafted.in_vain, drafted.submitted,
            rows.rounds, rows.drafted, rows.submitted, rows.accepted, rows.draft_forwards,
            rows.round_accepted, kept, live, lengths, width, rows.tokens.shape[1], len(end_ids),
            DRAFTED=bool(drafted.ids), WIDTH=power_of_two(width), BLOCK=_block(end_ids),
        )  # fmt: skip
    return kept, live, lengths


def _block(end_ids: Tensor) -> int:
    return power_of_two(max(1, len(end_ids)))


@cache
def _proven(device: torch.device) -> bool:
    """Tried once, against torch."""
    return holds(lambda: agree(device), "the loop", device)


def agree(device: torch.device, batch: int = 9, slots: int = 6, tries: int = 6) -> None:
    """Raises AssertionError where the kernels say anything else than `Rows` does in torch."""
    from accept_head.inference.decode.drafted import Drafted, Going
    from accept_head.inference.decode.rows import Rows
    from accept_head.inference.decode.stopping import Stopping
    from accept_head.inference.decode.verify import Verified

    random = torch.Generator().manual_seed(0)

    def numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape or (batch,), generator=random).to(device)

    for number in range(tries):
        stopping = Stopping(range(0, 2 * number, 2), [], device)
        values = {"tokens": numbers(9, batch, 20 + slots), "lengths": 1 + numbers(20), "keys": numbers(1 << 62)}
        values |= {"rounds": numbers(99), "live": numbers(4) > 0, "fed": numbers(3), "max_lengths": 10 + numbers(24)}
        going = Going(numbers(slots), numbers(3) > 0, numbers(slots), numbers(2))
        drawn = Drafted(numbers(slots), numbers(slots), numbers(2), slots - 1, ids=[numbers(9)] * (number % 2))
        verified, ids = Verified(numbers(slots), numbers(9)), numbers(9)
        found = []
        for by in (_by_kernels, _by_torch):
            rows = Rows(batch, 20, slots, device)
            for name, value in values.items():
                getattr(rows, name).copy_(value)
            made = by(rows, slots - 1, ids, going, drawn, verified, stopping)
            found.append([*(each.clone() for each in rows.tensors), *made])
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def _by_kernels(
    rows: Rows, slots: int, ids: Tensor, going: Going, drawn: Drafted, verified: Verified, stopping: Stopping
) -> list[Tensor]:
    set_uniforms(rows, 7, slots)
    before = [*last(rows, 2, slots), *go_on(rows, slots, ids, stopping.end_ids, going)]
    return [*before, *accept(rows, drawn, verified, stopping.end_ids)]


def _by_torch(
    rows: Rows, slots: int, ids: Tensor, going: Going, drawn: Drafted, verified: Verified, stopping: Stopping
) -> list[Tensor]:
    rows.set_uniforms_in_torch(7, slots)
    before = [*rows.last_in_torch(2, slots), *rows.go_on_in_torch(slots, ids, going, stopping)]
    return [*before, *rows.accept_in_torch(drawn, verified, stopping)]
