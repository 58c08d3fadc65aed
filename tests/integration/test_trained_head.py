"""On a trained pair, a trained head predicts acceptance better than the mean acceptance does.

All figures are recomputed in numpy: the constant's KL from the parquet files, and the head's KL from its safetensors
file, on the draft's hidden states and its distribution of Y_i. These come from one ordinary forward for every
(x, X_<i, Y_i).
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from scipy.special import expit, xlogy
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

BAR = 0.85  # the head's KL must be at most this share of the constant predictor's


@pytest.fixture(scope="module")
def trained_head(embedded_traces, embedded_pair_folder, run_warm, tmp_path_factory):
    """A head by the default recipe, evaluated on the dev traces."""
    train, dev = embedded_traces("train"), embedded_traces("dev")
    out = tmp_path_factory.mktemp("trained") / "head"
    folders = ("--draft", embedded_pair_folder / "draft", "--out", out)
    done = run_warm("train", "--traces", train, "--dev_traces", dev, *folders)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def dev_records(embedded_traces):
    return [row for path in sorted(embedded_traces("dev").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def dev_positions(dev_records, embedded_pair_folder):
    """(draft states, labels (n,)) of every dev position."""
    draft = AutoModelForCausalLM.from_pretrained(embedded_pair_folder / "draft", dtype=torch.float32)
    embeddings = draft.get_input_embeddings().weight.detach()
    drawn, before, signals, embedded, labels = [], [], [], [], []
    for row in dev_records:
        prompt, response, proposals = row["prompt_ids"], row["response_ids"], row["draft_ids"]
        inputs = [[*prompt, *response[:i], proposal] for i, proposal in enumerate(proposals)]
        lengths = torch.tensor([len(ids) for ids in inputs])
        # On the right of the last token, where a causal model does not look.
        padded = torch.tensor([ids + [0] * (int(lengths.max()) - len(ids)) for ids in inputs])
        with torch.no_grad():
            output = draft(input_ids=padded, output_hidden_states=True, use_cache=False)
        rows = torch.arange(len(inputs))
        drawn.append(output.hidden_states[-1][rows, lengths - 1])
        before.append(output.hidden_states[-1][rows, lengths - 2])
        signals += map(draft_signals, output.logits[rows, lengths - 2].double().numpy(), proposals)
        embedded.append(embeddings[proposals])
        labels += row["acceptance"]
    drawn, before, embedded = (torch.cat(parts).double().numpy() for parts in (drawn, before, embedded))
    return States(drawn, before, np.array(signals), embedded), np.array(labels)


class States(NamedTuple):
    """What a head may read of each Y_i: the state at it, the state it was drawn from, the draft signals, and its
    embedding.

    drawn, before, embedded: (n, hidden); signals: (n, 3).
    """

    drawn: np.ndarray
    before: np.ndarray
    signals: np.ndarray
    embedded: np.ndarray


def draft_signals(logits, proposal, top_k=50):
    """log q(Y), the entropy of q and its largest probability, with q the softmax over the 50 largest logits."""
    weights = np.where(logits >= np.sort(logits)[-top_k], np.exp(logits - logits.max()), 0)
    q = weights / weights.sum()
    return np.log(q[proposal]), -xlogy(q, q).sum(), q.max()


def predict(head_folder, states):
    """P̂ of a saved head with one prediction, in float64.

    A logistic regression on nine functions of the draft signals, plus a residual: SiLU blocks and a linear layer
    (SpecDec++ eq. 4.1) on the sum of linear maps of the hidden state, of these functions and of the scaled embedding.
    An untrained head of the paper's reads the state alone.
    """
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(head_folder / "model.safetensors").items()}
    config = json.loads((head_folder / "config.json").read_text())
    hidden = {"drawn": states.drawn, "before": states.before}[config["reads"]]
    base = 0.0
    if config["base"]:
        assert config["signals"] == ["draft_logprob", "draft_entropy", "draft_max_prob"]
        normalised = (functions_of(states.signals) - config["signal_mean"]) / config["signal_std"]
        base = (normalised @ weights["base.weight"].T + weights["base.bias"])[:, 0]
        if not config["residual"]:
            return expit(base)
        hidden = hidden @ weights["state_input.weight"].T + weights["state_input.bias"]
        hidden = hidden + normalised @ weights["signal_input.weight"].T
    if config.get("embedding_std") is not None:
        hidden = hidden + states.embedded / config["embedding_std"] @ weights["embedding_input.weight"].T
    for block in range(config["depth"]):
        inner = hidden @ weights[f"blocks.{block}.linear.weight"].T + weights[f"blocks.{block}.linear.bias"]
        hidden = hidden + inner / (1 + np.exp(-inner))
    return expit(base + (hidden @ weights["output.weight"].T + weights["output.bias"])[:, 0])


def functions_of(signals):
    """The nine of accept_head/base.py, in their order."""
    log_q, entropy, largest = signals.T
    log_q, log_largest = np.maximum(log_q, -14), np.log(largest)
    log_odds = [np.clip(log_p - np.log(-np.expm1(log_p)), -14, 14) for log_p in (log_q, log_largest)]
    functions = [log_q, entropy, largest, np.exp(log_q), *log_odds, np.sqrt(entropy), log_q * entropy]
    return np.stack([*functions, log_q - log_largest], axis=-1)


def binary_kl(labels, predicted):
    """Mean KL of two Bernoulli distributions, nats."""
    own = xlogy(labels, labels) + xlogy(1 - labels, 1 - labels)
    return float(np.mean(own - labels * np.log(predicted) - (1 - labels) * np.log1p(-predicted)))


def constant_kl(labels):
    return binary_kl(labels, np.full_like(labels, labels.mean()))


def test_trained_head_beats_the_constant_predictor_by_15_percent(trained_head, dev_positions):
    states, labels = dev_positions
    assert json.loads((trained_head / "config.json").read_text())["residual"], "the state pays on the embedded pair"
    assert binary_kl(labels, predict(trained_head, states)) <= BAR * constant_kl(labels)


def test_reported_metrics_are_those_computed_by_hand(trained_head, dev_positions):
    states, labels = dev_positions
    predicted = predict(trained_head, states)
    reported = json.loads((trained_head / "metrics.json").read_text())["dev"]["token"]
    edges = np.minimum((predicted * 15).astype(int), 14)
    ece = sum(
        abs(predicted[edges == bin].mean() - labels[edges == bin].mean()) * (edges == bin).mean()
        for bin in np.unique(edges)
    )
    assert reported["count"] == len(labels)
    assert reported["binary_kl"] == pytest.approx(binary_kl(labels, predicted), abs=1e-4)
    assert reported["constant_kl"] == pytest.approx(constant_kl(labels), abs=1e-6)
    assert reported["brier"] == pytest.approx(np.mean((predicted - labels) ** 2), abs=1e-4)
    assert reported["ece"] == pytest.approx(ece, abs=2e-3)  # a prediction may lie on the edge of a bin
    assert reported["auroc"] == pytest.approx(soft_auroc(predicted, labels), abs=1e-4)
    assert reported["mean_predicted"] == pytest.approx(predicted.mean(), abs=1e-4)
    assert reported["mean_observed"] == pytest.approx(labels.mean(), abs=1e-6)


def soft_auroc(predicted, labels):
    """Each position is a positive of weight a and a negative of weight 1 − a; scikit-learn takes the weights."""
    from sklearn.metrics import roc_auc_score

    outcomes = np.repeat([1, 0], len(labels))
    return roc_auc_score(outcomes, np.tile(predicted, 2), sample_weight=np.concatenate([labels, 1 - labels]))


def test_predicted_acceptance_orders_what_was_accepted(trained_head, dev_positions, dev_records):
    """The head has seen labels; the coupled outcomes agree with it too: higher predictions, more acceptance."""
    states, _ = dev_positions
    accepted = np.array([flag for row in dev_records for flag in row["accepted"]])
    by_prediction = accepted[predict(trained_head, states).argsort()]
    low, high = (part.mean() for part in np.array_split(by_prediction, 2))
    assert high - low > 0.1


def test_shipped_train_dev_and_test_prompts_do_not_overlap(embedded_pair_folder):
    splits = {}
    for split in ("train", "dev", "test"):
        lines = (embedded_pair_folder / "prompts" / f"{split}.jsonl").read_text().splitlines()
        splits[split] = {json.loads(line)["prompt"] for line in lines}
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not splits[one] & splits[other], f"prompts that are in {one} and in {other}"
