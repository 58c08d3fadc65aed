"""The gradients computed by hand against autograd through the head and the loss by its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit
from torch.nn.functional import logsigmoid

from accept_head import AcceptanceHead, HeadConfig
from accept_head.quality import binary_kl
from accept_head.signals import SIGNALS
from accept_head.training.learn.gradient import KnownGradients, head_loss
from accept_head.training.learn.positions import Positions, SharedRows

COUNT, HIDDEN, VOCAB = 37, 16, 11
W_ACC, W_REJ = 2.0, 6.0


def make_head(depth, predicts="token", signals=False, embedding=False, width=None):
    torch.manual_seed(depth)
    more = {"signals": SIGNALS, "signal_mean": (-0.5, 0.4, 0.6), "signal_std": (0.3, 0.2, 0.25)} if signals else {}
    more |= {"embedding_std": 0.7} if embedding else {}
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=depth, predicts=predicts, width=width, **more))
    head.attach(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)))
    for block in head.blocks:  # blocks start at zero; a trained one does not
        torch.nn.init.normal_(block.linear.weight, std=0.2)
        torch.nn.init.normal_(block.linear.bias, std=0.2)
    return head


def make_inputs(head):
    """(hidden, signals, ids, labels, mask); with two predictions, some positions count for one of them only."""
    generator = torch.Generator().manual_seed(7)
    predictions = len(head.config.predictions)
    hidden, signals = torch.randn(COUNT, HIDDEN, generator=generator), torch.rand(COUNT, 3, generator=generator)
    labels = torch.rand(COUNT, predictions, generator=generator)
    labels[:3] = torch.tensor([0.0, 1.0, 0.5]).unsqueeze(-1)
    mask = torch.rand(COUNT, predictions, generator=generator) < (0.6 if predictions > 1 else 2)
    return hidden, signals, torch.randint(VOCAB, (COUNT,), generator=generator), labels, mask


def by_hand(head, inputs, *, place=None, dtype=torch.float32):
    hidden, signals, ids, labels, mask = inputs
    signals = head.normalised(signals) if head.config.signals else None
    embedded = SharedRows(head.embedded(ids)) if head.config.reads_embedding else None
    accept, reject = torch.where(mask, labels, 0.0), torch.where(mask, 1 - labels, 0.0)
    with torch.no_grad():
        positions = Positions(SharedRows(hidden), signals, embedded, accept, reject)
        if place is not None:  # states and embeddings are given once
            positions.states = SharedRows(hidden, place)
        if head.config.reads_embedding and place is not None:
            positions.embedded = SharedRows(head.embedded(torch.arange(VOCAB)), ids)
        return head_loss(head, positions, w_acc=W_ACC, w_rej=W_REJ, dtype=dtype)


def by_autograd(head, inputs):
    hidden, signals, ids, labels, mask = inputs
    logits = head(hidden, signals, ids)
    accepted, rejected = labels * logsigmoid(logits), (1 - labels) * logsigmoid(-logits)
    value = -(W_ACC * accepted + W_REJ * rejected)[mask].sum()  # docs/theory.md §4
    return value, torch.autograd.grad(value, list(head.parameters()))


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"signals": True},
        {"predicts": "next"},
        {"predicts": "both"},
        {"embedding": True},
        {"signals": True, "embedding": True, "width": 24},
        {"width": 8, "predicts": "both"},
        {"signals": True, "embedding": True, "width": 24, "predicts": "both"},
    ],
    ids=str,
)
def test_value_and_gradients_are_autograds(depth, options):
    head = make_head(depth, **options)
    inputs = make_inputs(head)
    got, (value, gradients) = by_hand(head, inputs), by_autograd(head, inputs)
    torch.testing.assert_close(got.value, value, rtol=1e-5, atol=1e-5)
    assert len(got.gradients) == len(gradients)
    for (name, _), mine, wanted in zip(head.named_parameters(), got.gradients, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def loss_of_logit(logit, accept, reject, w_acc=1.0, w_rej=1.0):
    """(value, gradient to the logit) of a head that says this logit of every position, with labels a and 1 − a."""
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=0))
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.constant_(head.output.bias, logit)
    states = torch.randn(len(accept), HIDDEN, generator=torch.Generator().manual_seed(1))
    labels = [torch.tensor(values, dtype=torch.float32).unsqueeze(-1) for values in (accept, reject)]
    with torch.no_grad():
        loss = head_loss(head, Positions(SharedRows(states), None, None, *labels), w_acc=w_acc, w_rej=w_rej)
    of_bias = [name for name, _ in head.named_parameters()].index("output.bias")
    return loss.value.item(), loss.gradients[of_bias].item()


def test_loss_of_three_positions_by_hand():
    # z = 0: P̂ = ½, both logs are log ½.  a = 1, ½, 0 with w_rej = 3:
    #   value = ln 2·(1 + (½ + 3·½) + 3) = 6 ln 2        d/dz = −½·(1 + ½) + 3·½·(½ + 1) = 1.5
    value, gradient = loss_of_logit(0.0, [1, 0.5, 0], [0, 0.5, 1], w_rej=3.0)
    assert value == pytest.approx(6 * np.log(2), rel=1e-6)
    assert gradient == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("logit", [80.0, -80.0])
@pytest.mark.parametrize("label", [0.0, 0.25, 1.0])
def test_extreme_logits_stay_finite_and_exact(logit, label):
    value, gradient = loss_of_logit(logit, [label], [1 - label], w_rej=6.0)
    expected = label * np.logaddexp(0, -logit) + 6 * (1 - label) * np.logaddexp(0, logit)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-30)
    assert gradient == pytest.approx(-label * expit(-logit) + 6 * (1 - label) * expit(logit), abs=1e-6)


def test_a_position_that_does_not_count_has_neither_value_nor_gradient():
    assert loss_of_logit(0.7, [0.3, 0.0], [0.7, 0.0]) == pytest.approx(loss_of_logit(0.7, [0.3], [0.7]), rel=1e-6)
    assert loss_of_logit(-50.0, [0.0], [0.0]) == (0.0, 0.0)


SHARED = [
    {"signals": True},
    {"embedding": True},
    {"signals": True, "embedding": True, "width": 24, "predicts": "both"},
    {"width": 8},
]


@pytest.mark.parametrize("options", SHARED, ids=str)
def test_what_several_positions_read_is_as_of_each_its_own(options):
    """States and embeddings are given once, some are read by many positions and some by none, and each goes once
    through weights of its own."""
    head = make_head(2, **options)
    hidden, *others = make_inputs(head)
    states, place = hidden[:9], torch.arange(COUNT) * 8 // COUNT  # of the last state, nothing was drawn
    place[place == 4] = 5
    got = by_hand(head, (states, *others), place=place)
    value, gradients = by_autograd(head, (states[place], *others))
    torch.testing.assert_close(got.value, value, rtol=1e-5, atol=1e-5)
    for (name, _), mine, wanted in zip(head.named_parameters(), got.gradients, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_labels_of_one_draw_may_be_summed():
    """The same token drawn three times from a state: one position with the sums of a and 1 − a."""
    head = make_head(2, signals=True)
    hidden, signals, ids, labels, mask = make_inputs(head)
    value, gradients = by_autograd(
        head, [part.repeat_interleave(3, 0) for part in (hidden, signals, ids, labels, mask)]
    )
    with torch.no_grad():
        positions = Positions(SharedRows(hidden), head.normalised(signals), None, 3 * labels, 3 * (1 - labels))
        got = head_loss(head, positions, w_acc=W_ACC, w_rej=W_REJ)
    torch.testing.assert_close(got.value, value, rtol=1e-5, atol=1e-5)
    for mine, wanted in zip(got.gradients, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("predicts", ["token", "both"])
def test_cross_entropy_less_the_labels_entropy_is_the_binary_kl(predicts):
    """Without loss weights, each prediction on its own."""
    head = make_head(3, predicts)
    hidden, _, _, labels, mask = inputs = make_inputs(head)
    cross_entropy = by_hand(head, inputs).cross_entropy
    kl = binary_kl(labels, head(hidden))
    for axis in range(len(head.config.predictions)):
        counted = mask[:, axis]
        entropy = binary_kl(labels, torch.zeros_like(labels))[counted, axis]  # log 2 − H(a)
        entropy = (counted.sum() * torch.log(torch.tensor(2.0)) - entropy.sum()).float()
        torch.testing.assert_close(
            (cross_entropy[axis] - entropy).double(), kl[counted, axis].sum(), rtol=1e-4, atol=1e-4, check_dtype=False
        )


@pytest.mark.parametrize("options", [{}, {"embedding": True, "width": 24}], ids=str)
def test_bfloat16_products_are_close_and_the_gradients_float32(options):
    head = make_head(3, signals=True, **options)
    inputs = make_inputs(head)
    exact, rounded = by_hand(head, inputs), by_hand(head, inputs, dtype=torch.bfloat16)
    for one, other in zip(exact.gradients, rounded.gradients, strict=True):
        assert other.dtype == torch.float32
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.05 * one.norm()


def test_known_gradients_arrive_scaled_as_the_loss_is():
    weights = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    gradients = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 4.0])]
    loss = KnownGradients.apply(torch.tensor(5.0), gradients, *weights)
    assert loss.item() == 5
    for _ in range(2):
        (KnownGradients.apply(torch.tensor(5.0), gradients, *weights) / 4).backward()
    for weight, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(weight.grad, gradient / 2)
