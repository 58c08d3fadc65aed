"""Verification by kernels, against docs/theory.md §1 in numpy and against torch, on a GPU or in Triton's interpreter.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accept_head import Sampling
from accept_head.inference.kernels import verify as operations
from accept_head.inference.kernels.verify import by_match, by_ratio
from tests.inference.support.changed_kernels import use_kernels
from tests.inference.support.kernels import DEVICE, runs

pytestmark = pytest.mark.usefixtures("anywhere")


def round_of(batch, slots, vocab, distance):
    """p, q, candidates drawn from q, how many each row has drafted, numbers for acceptance, numbers for redraws."""
    generator = torch.Generator().manual_seed(batch + slots + vocab)
    logits = torch.randn(batch, slots + 1, vocab, generator=generator) * 2
    noise = torch.randn(batch, slots, vocab, generator=generator) * distance
    p, q = (Sampling(top_k=20).probabilities(each) for each in (logits, logits[:, :slots] + noise))
    ids = q.flatten(0, 1).multinomial(1, generator=generator).view(batch, slots)
    drafted = torch.randint(0, slots + 1, (batch,), generator=generator)
    numbers = torch.rand(batch, slots, generator=generator, dtype=torch.float64)
    redraws = torch.rand(batch, generator=generator, dtype=torch.float64)
    return [each.to(DEVICE) for each in (p, q, ids, drafted, numbers, redraws)]


def by_numpy(p, q, ids, drafted, numbers, redraws):
    """Leviathan et al. 2023, algorithm 1, one row after another."""
    given = [each.cpu().numpy().astype(np.float64) for each in (p, q, numbers, redraws)]
    accepted, next_ids = [], []
    for p, q, y, count, u, redraw in zip(*given[:2], ids.tolist(), drafted.tolist(), *given[2:], strict=True):
        n = 0
        while n < count and q[n, y[n]] > 0 and u[n] < p[n, y[n]] / q[n, y[n]]:
            n += 1
        weights = np.maximum(p[n] - q[n], 0) if n < count else p[n]
        sums = np.cumsum(weights)
        accepted.append(n)
        next_ids.append(int(np.searchsorted(sums, redraw * sums[-1], side="right")))
    return accepted, next_ids


@runs
@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("batch, slots, vocab", [(1, 1, 5), (3, 4, 1024), (7, 5, 2500), (40, 3, 5000)])
def test_the_ratio_test_is_that_of_the_paper(batch, slots, vocab, distance):
    given = round_of(batch, slots, vocab, distance)
    accepted, ids, acceptance = operations.ratio_by_kernel(*given)
    assert (accepted.tolist(), ids.tolist()) == by_numpy(*given)
    assert torch.equal(acceptance, operations.ratio_in_torch(*given).acceptance)
    assert (given[0][torch.arange(batch), accepted].gather(1, ids[:, None]) > 0).all()


@runs
def test_emitted_tokens_are_the_targets():
    """One position, many rows: whatever q is, the first token is distributed as p (docs/theory.md §1). χ²; p < 1e-4
    fails. With a draft that is taken as it is they are not."""
    rows, vocab = 2000, 7
    p, q, *_ = round_of(1, 1, vocab, 1.0)
    generator = torch.Generator().manual_seed(3)
    ids = q[0].cpu().multinomial(rows, replacement=True, generator=generator).T.contiguous().to(DEVICE)
    numbers = torch.rand(2, rows, 1, generator=generator, dtype=torch.float64).to(DEVICE)
    drafted = torch.ones(rows, dtype=torch.long, device=DEVICE)
    spread = p.expand(rows, -1, -1), q.expand(rows, -1, -1)
    accepted, next_ids, _ = operations.ratio_by_kernel(*spread, ids, drafted, numbers[0], numbers[1, :, 0])
    first = torch.where(accepted > 0, ids[:, 0], next_ids)

    def chance(tokens):
        expected = p[0, 0].cpu().double().numpy() * rows
        counts = np.bincount(tokens.cpu().numpy(), minlength=vocab)
        assert not counts[expected == 0].any()
        counts, expected = counts[expected > 0], expected[expected > 0]
        statistic = torch.tensor(((counts - expected) ** 2 / expected).sum())
        return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), statistic.float() / 2)

    assert chance(first) > 1e-4 > chance(ids[:, 0])


@runs
@pytest.mark.parametrize("slots", [1, 2, 5, 8])
def test_a_match_is_that_of_equal_tokens(slots):
    generator = torch.Generator().manual_seed(slots)
    targets = torch.randint(0, 3, (50, slots + 3), generator=generator).to(DEVICE)[:, 1 : slots + 2]
    ids = torch.randint(0, 3, (50, slots), generator=generator).to(DEVICE)
    ids[:9] = targets[:9, :slots]
    drafted = torch.randint(0, slots + 1, (50,), generator=generator).to(DEVICE)
    accepted, next_ids, _ = operations.match_by_kernel(targets, ids, drafted)
    expected = [
        next((n for n in range(count) if row[n] != own[n]), count)
        for row, own, count in zip(targets.tolist(), ids.tolist(), drafted.tolist(), strict=True)
    ]
    assert accepted.tolist() == expected and len(set(expected)) > 1
    assert next_ids.tolist() == [row[n] for row, n in zip(targets.tolist(), expected, strict=True)]


@runs
def test_memory_with_gaps_and_what_the_kernels_do_not_serve():
    p, q, ids, drafted, numbers, redraws = given = round_of(4, 3, 600, 1.0)
    accepted, next_ids, acceptance = operations.ratio_by_kernel(*given)
    room = torch.full((4, 5, 6, 700), torch.nan, device=DEVICE)
    room[:, 0, :4, :600], room[:, 1, :3, :600] = p, q
    others = torch.full((4, 9), -1, device=DEVICE), torch.full((4, 2, 9), torch.nan, dtype=torch.float64, device=DEVICE)
    others[0][:, 2:5], others[1][:, 0, :3], others[1][:, 1, 0] = ids, numbers, redraws
    apart = room[:, 0, :4, :600], room[:, 1, :3, :600], others[0][:, 2:5], drafted
    found = operations.ratio_by_kernel(*apart, others[1][:, 0, :3], others[1][:, 1, 0])
    assert all(map(torch.equal, found, (accepted, next_ids, acceptance)))
    transposed = p.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(operations.ratio_by_kernel(transposed, *given[1:])[1], next_ids)
    with pytest.raises(ValueError, match=r"p is torch\.float64 and q torch\.float32, expected float32"):
        operations.ratio_by_kernel(p.double(), *given[1:])
    precise = by_ratio(p.double(), q.double(), *given[2:])
    assert precise.acceptance.dtype is torch.float64 and torch.equal(precise.accepted, accepted)
    empty = [each[:0] for each in given]
    assert by_ratio(*empty).next_ids.shape == (0,) and by_match(ids[:0], ids[:0, :2], drafted[:0]).accepted.numel() == 0


RATIO = "tl.div_rn(p_of_y, tl.where(q_of_y > 0, q_of_y, 1.0))"
NUMBER = "first = _leading(number < ratio.to(tl.float64), slot, count, slots)"
POSITIVE = "tl.maximum(of_p - of_q, 0.0)"
LEADING = "tl.min(tl.where(passed & (slot < count), slots, slot), 0)"
THERE = "tl.load(targets + row * targets_row + first)"
WRONG = {
    "the ratio upside down": (RATIO, "tl.div_rn(q_of_y, tl.where(p_of_y > 0, p_of_y, 1.0))"),
    "tokens that q does not keep": ("tl.where(q_of_y > 0, tl.div_rn", "tl.where(q_of_y >= 0, tl.div_rn"),
    "acceptance above 1": ("ratio = tl.minimum(ratio, 1.0)", "ratio = ratio"),
    "all candidates are taken": (NUMBER, NUMBER.replace("number < ratio.to(tl.float64)", "number < 2")),
    "others than its own are taken": ("passed & (slot < count)", "passed"),
    "accepted behind a rejected one": (LEADING, "tl.sum((passed & (slot < count)).to(tl.int32), 0)"),
    "redrawn from p": ("rejected = first < count", "rejected = first < 0"),
    "a bonus from the residual": ("rejected = first < count", "rejected = first <= count"),
    "the residual upside down": (POSITIVE, "tl.maximum(of_q - of_p, 0.0)"),
    "the residual with its sign": (POSITIVE, "(of_p - of_q)"),
    "the residual of the first slot": ("q + row * q_row + tl.minimum(first, slots - 1) * q_slot", "q + row * q_row"),
    "no way out where p is q": ("if not from_residual:", "if split < 0:"),
    "the next of another place": (THERE, THERE.replace(" + first", "")),
    "everything matches": ("_leading(theirs == ours,", "_leading(theirs >= 0,"),
}  # fmt: skip


@runs
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_anything_else_is_seen(wrong, monkeypatch, tmp_path):
    use_kernels(monkeypatch, tmp_path, "verify", WRONG.get(wrong))
    if wrong is None:
        operations.compare(DEVICE)
    else:
        with pytest.raises(Exception, match=r"(?i)not close|not equal|mismatch|beside the tensors"):
            operations.compare(DEVICE)
