"""A head that reads the draft's embedding of the drawn token, and a head with its own width."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.head import scorer as module
from accept_head.head.saved import load_head
from accept_head.head.scorer import make_scorer

HIDDEN, VOCAB, STD = 8, 13, 0.25
SIGNALS = {
    "signals": ("draft_logprob", "draft_entropy", "draft_max_prob"),
    "signal_mean": (-1.0, 1.0, 0.5),
    "signal_std": (1.0, 0.5, 0.2),
}


def made(**config):
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, **{"depth": 2, "embedding_std": STD, **config}))
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return head


def embeddings(dtype=torch.float32):
    return (STD * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))).to(dtype)


def inputs(*shape):
    """(hidden, signals, token_ids)."""
    generator = torch.Generator().manual_seed(2)
    hidden, signals = torch.randn(*shape, HIDDEN, generator=generator), torch.rand(*shape, 3, generator=generator)
    return hidden, signals, torch.randint(VOCAB, shape, generator=generator)


@pytest.mark.parametrize("width", [None, 5, 20])
@pytest.mark.parametrize("signals", [{}, SIGNALS], ids=["no signals", "signals"])
def test_logits_follow_the_formula(width, signals):
    head = made(width=width, **signals).attach(embeddings())
    weights = {name: value.numpy().astype(np.float64) for name, value in head.state_dict().items()}
    hidden, three, ids = (each.numpy() for each in inputs(4, 3))
    x = hidden.astype(np.float64) if width is None else hidden @ weights["state_input.weight"].T
    if signals:
        normalised = (three - np.array(SIGNALS["signal_mean"])) / np.array(SIGNALS["signal_std"])
        x = x + normalised @ weights["signal_input.weight"].T
    x = x + embeddings().numpy()[ids] / STD @ weights["embedding_input.weight"].T
    for block in range(2):
        z = x @ weights[f"blocks.{block}.linear.weight"].T + weights[f"blocks.{block}.linear.bias"]
        x = x + z / (1 + np.exp(-z))
    expected = x @ weights["output.weight"].T + weights["output.bias"]
    np.testing.assert_allclose(head(*inputs(4, 3)).detach().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("table_bytes", [module.TABLE_BYTES, 0], ids=["table", "no table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [None, 20])
def test_serving_scores_are_the_probabilities(monkeypatch, table_bytes, dtype, width):
    monkeypatch.setattr(module, "TABLE_BYTES", table_bytes)
    head = made(width=width, **SIGNALS).attach(embeddings(dtype))
    both = made(width=width, predicts="both", **SIGNALS).attach(embeddings(dtype))
    for shape in ((6,), (2, 3), (0,), ()):
        read = inputs(*shape)
        with torch.no_grad():
            for one in (head, both):
                expected = one.probability(read[0], "token", *read[1:])
                torch.testing.assert_close(make_scorer(one)(*read), expected, rtol=1e-5, atol=1e-6)
            expected = both(*read).sigmoid()  # (..., 2)
            torch.testing.assert_close(make_scorer(both, "both")(*read), expected, rtol=1e-5, atol=1e-6)


def test_both_are_refused_where_one_of_them_is_not_made():
    for predicts in ("token", "next"):
        with pytest.raises(InputError, match="was asked for"):
            make_scorer(AcceptanceHead(HeadConfig(hidden_size=HIDDEN, predicts=predicts)), "both")


@pytest.mark.parametrize(
    ("looks", "config"),
    [
        (True, {"predicts": "both"}),
        (True, {"predicts": "both", "reads": "before", "embedding_std": STD}),
        (True, {"predicts": "both", "reads": "before", **SIGNALS}),
        (False, {"predicts": "both", "reads": "before"}),
        (False, {"predicts": "token", **SIGNALS}),
        (False, {"predicts": "next"}),
    ],
    ids=str,
)
def test_who_looks_beyond_the_drawn_token(looks, config):
    assert HeadConfig(hidden_size=4, **config).looks_ahead == looks


def test_the_drafts_embeddings_are_not_among_the_weights(tmp_path):
    head = made(width=5).attach(embeddings())
    head.save_pretrained(tmp_path)
    assert not any(VOCAB in tensor.shape for tensor in load_file(tmp_path / "model.safetensors").values())
    loaded = load_head(tmp_path, hidden_size=HIDDEN, embeddings=embeddings())
    assert loaded.config == head.config
    assert torch.equal(loaded(*inputs(3)), head(*inputs(3)))


@pytest.mark.parametrize(
    "wrong", [None, torch.zeros(VOCAB, HIDDEN + 1), torch.zeros(HIDDEN)], ids=["none", "wide", "1-d"]
)
def test_embeddings_that_do_not_fit_are_refused_with_the_heads_name(tmp_path, wrong):
    made().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}.*embedding matrix \\(vocab, {HIDDEN}\\)"):
        load_head(tmp_path, hidden_size=HIDDEN, embeddings=wrong)
    with pytest.raises(InputError, match="embedding matrix"):
        made().attach(wrong)


def test_nothing_is_read_before_the_embeddings_are_there():
    for use in (lambda head: head(*inputs(3)), lambda head: make_scorer(head)):
        with pytest.raises(InputError, match=r"attach\(embeddings\) comes first"):
            use(made())
    with pytest.raises(InputError, match="the drawn token, but none"):
        made().attach(embeddings())(inputs(3)[0])


def test_a_head_that_reads_no_embedding_ignores_them():
    head = made(embedding_std=None)
    assert head.attach(None) is head
    assert head.attach(embeddings()).embeddings is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"embedding_std": 0}, "embedding_std"),
        ({"embedding_std": float("nan")}, "embedding_std"),
        ({"embedding_std": True}, "embedding_std"),
        ({"predicts": "next"}, "predicts"),
        ({"width": 0}, "width"),
        ({"width": 2.5}, "width"),
        ({"width": True}, "width"),
    ],
)
def test_a_wrong_config_is_refused_by_name(changes, word):
    with pytest.raises(InputError, match=word):
        made(**changes)
