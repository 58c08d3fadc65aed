"""One optimizer step against the formula, computed by hand with one ordinary forward per position."""

from __future__ import annotations

import copy
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import lightning as L
import numpy as np
import pytest
import torch
from datasets import Dataset

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.quality import Quality
from accept_head.signals import SIGNALS
from accept_head.trace.columns import ALTERNATIVE_COLUMNS, trace_features
from accept_head.training.learn import module as module_module
from accept_head.training.learn.batches import collate
from accept_head.training.learn.candidates import Candidate, Outcome
from accept_head.training.learn.data import TraceData
from accept_head.training.learn.module import HeadTraining

LENGTHS = [(3, 9), (6, 2), (2, 14), (4, 5), (1, 8), (5, 1), (7, 6), (2, 3)]  # 8 traces: one step
W_ACC, W_REJ = 1.0, 6.0


class Recording(HeadTraining):
    """Keeps the gradients with which the optimizer steps."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.seen = [parameter.grad.clone() for parameter in self.heads.parameters()]


@pytest.fixture
def draft(random_llama):
    return random_llama(2, hidden=16, layers=2)


@pytest.fixture
def traces(make_traces):
    return Dataset.from_list(make_traces(LENGTHS), features=trace_features())


def new_head(predicts="both", depth=2, seed=0):
    """predicts: as in a HeadConfig; or the token, with the draft `signals` read too, maybe from the state `before`; or
    both from there, which looks `ahead` of the drawn token."""
    torch.manual_seed(seed)
    more = {}
    if predicts in ("signals", "before", "ahead"):
        reads, predicts = "drawn" if predicts == "signals" else "before", "both" if predicts == "ahead" else "token"
        more = {"signals": SIGNALS, "signal_mean": (-0.5, 0.4, 0.6), "signal_std": (0.3, 0.2, 0.25), "reads": reads}
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=depth, predicts=predicts, **more))
    for block in head.blocks:  # blocks start at zero; a trained one does not
        torch.nn.init.normal_(block.linear.weight, std=0.2)
    return head


def fit(
    head,
    draft,
    traces,
    *,
    micro_batch_size=8,
    batch_size=8,
    steps=1,
    packing="exact",
    w_rej=W_REJ,
    alternatives=0,
    **changes,
):
    """head: one, or a list of Candidates. An epoch of 8 traces is one step."""
    candidates = head if isinstance(head, list) else [Candidate("", head, w_rej)]
    options = {"lr": 1e-3, "total_steps": 10, "steps_per_epoch": 1, "warmup_share": 0.0, "w_acc": W_ACC, **changes}
    module = Recording(candidates, draft, **options)
    options = {"packing": packing, "r": 0.5, "epochs": 10, "batch_size": batch_size, "seed": 0}
    data = TraceData(traces, traces, micro_batch_size=micro_batch_size, alternatives=alternatives, **options)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=batch_size // micro_batch_size,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data)
    return module


def separate_hidden_state(draft, ids):
    return draft(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]


def loss_terms(head, draft, trace):
    """(numerator, denominator) of the weighted loss of one trace: token and next predictions, position by position."""
    prompt, response, proposals = trace["prompt_ids"], trace["response_ids"], trace["draft_ids"]
    value, weight = 0.0, 0.0
    for i, proposal in enumerate(proposals):
        judging = separate_hidden_state(draft, prompt + response[:i] + [proposal] * (head.config.reads == "drawn"))
        states = {"token": (judging, trace["acceptance"][i])}
        if not head.config.sees_drawn:
            states["next"] = separate_hidden_state(draft, prompt + response[:i]), trace["overlap"][i]
        elif trace["accepted"][i] and i + 1 < len(proposals):
            states["next"] = judging, trace["overlap"][i + 1]
        for name in head.config.predictions:
            if name not in states:
                continue
            state, label = states[name]
            signals = torch.tensor([trace[signal][i] for signal in SIGNALS])
            predicted = head(state, signals)[head.config.predictions.index(name)].sigmoid()
            value = value - W_ACC * label * predicted.log() - W_REJ * (1 - label) * (1 - predicted).log()
            weight += W_ACC * label + W_REJ * (1 - label)
    return value, weight


def gradients_by_hand(head, draft, traces):
    """Gradients of sum of numerators / sum of denominators."""
    head = copy.deepcopy(head)
    terms = [loss_terms(head, draft, trace) for trace in traces]
    (sum(value for value, _ in terms) / sum(weight for _, weight in terms)).backward()
    return [parameter.grad for parameter in head.parameters()]


@pytest.mark.parametrize("predicts", ["token", "next", "both", "signals", "before", "ahead"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_gradients_of_a_step_are_those_of_one_ratio_over_all_its_traces(draft, traces, micro_batch_size, predicts):
    head = new_head(predicts)
    expected = gradients_by_hand(head, draft, traces)
    packing = "prefix" if predicts in ("before", "ahead") else "exact"
    seen = fit(head, draft, traces, micro_batch_size=micro_batch_size, packing=packing).seen
    for got, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("predicts", ["before", "ahead"])
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_gradients_with_alternatives_are_those_of_one_ratio_over_all_draws(
    draft, make_traces, micro_batch_size, predicts
):
    """Each alternative as a trace of its own would have it: another token drawn, of which the acceptance is known."""
    records = make_traces(LENGTHS, alternatives=2)
    head, data = new_head(predicts), Dataset.from_list(records, features=trace_features(alternatives=True))
    others = [with_alternative(trace, number) for number in range(2) for trace in records]
    expected, without = (gradients_by_hand(head, draft, group) for group in ([*records, *others], records))
    seen = fit(head, draft, data, micro_batch_size=micro_batch_size, packing="prefix", alternatives=2).seen
    for got, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert max((a - b).abs().max() for a, b in zip(seen, without, strict=True)) > 1e-2, "the test has no power"


def with_alternative(trace, number):
    """The trace, had the draft drawn that alternative everywhere. What comes after it is not known."""
    its = {name.removeprefix("alternative_"): trace[name][number::2] for name in ALTERNATIVE_COLUMNS}
    changed = {"draft_ids": its["ids"], "draft_logprob": its["logprob"], "acceptance": its["acceptance"]}
    return {**trace, **changed, "accepted": [False] * len(its["ids"])}


def test_logged_training_loss_is_the_ratio_over_the_step(draft, traces):
    head = new_head()
    terms = [loss_terms(head, draft, trace) for trace in traces]
    expected = sum(value.item() for value, _ in terms) / sum(weight for _, weight in terms)
    module = fit(head, draft, traces, micro_batch_size=2)
    assert module.trainer.callback_metrics["train_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_a_second_step_does_not_remember_the_first(draft, traces):
    """The sums that divide a step's gradient start anew: two steps on the same traces at lr 0 have equal gradients."""
    once = fit(new_head(), draft, traces, micro_batch_size=2, lr=1e-30).seen
    twice = fit(new_head(), draft, traces, micro_batch_size=2, lr=1e-30, steps=2).seen
    for first, second in zip(once, twice, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("predicts", ["both", "signals"])
@pytest.mark.parametrize("packing", ["exact", "mixing"])
def test_only_the_head_learns(draft, traces, packing, predicts):
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    head = new_head(predicts)
    head_before = copy.deepcopy(head)
    module = fit(head, draft, traces, packing=packing, steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    assert all(parameter.grad is None for parameter in draft.parameters())
    for new, old in zip(head.parameters(), head_before.parameters(), strict=True):
        assert not torch.equal(new, old), "a parameter of the head does not learn"
    assert set(module.state_dict()) == {f"heads.0.{name}" for name in head.state_dict()} | {"train_sums"}


def test_the_draft_is_run_by_one_thread_at_a_time(draft, traces, monkeypatch):
    """Dev batches come while a training batch is read ahead, and some drafts change their tables with the length. Two
    threads try to meet inside the draft."""
    data = TraceData(traces, traces, packing="exact", r=0.5, epochs=1, batch_size=8, micro_batch_size=8, seed=0)
    batch = collate([data.train[0, row] for row in range(8)])
    options = {"lr": 1e-3, "total_steps": 10, "steps_per_epoch": 1, "warmup_share": 0.0, "w_acc": W_ACC}
    module = HeadTraining([Candidate("", new_head(), W_REJ)], draft, **options)
    meeting, met = threading.Barrier(2), []

    def run(**inputs):
        try:
            met.append(meeting.wait(timeout=0.2) >= 0)
        except threading.BrokenBarrierError:
            met.append(False)
        return draft.model(**inputs)

    monkeypatch.setattr(module_module, "base_model", lambda model: run)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: module.hidden_states(batch), range(2))
    assert met == [False] * 2 and torch.equal(first, second)


def indices_in(message):
    found = re.search(r"\[([\d, ]+)\]", message)
    assert found is not None, message
    return [int(number) for number in found.group(1).split(",")]


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "nan"), (float("inf"), "(nan|-?inf)")])
def test_a_label_that_is_not_finite_stops_the_run_at_its_own_micro_batch(draft, make_traces, value, said):
    records = make_traces(LENGTHS * 2)
    records[5]["acceptance"] = [value]
    poisoned = Dataset.from_list(records, features=trace_features())
    head = new_head("token")
    with pytest.raises(InputError, match=f"the loss is {said} at step [01]") as caught:
        fit(head, draft, poisoned, micro_batch_size=2, steps=2)
    named = indices_in(str(caught.value))
    assert 5 in named and len(named) == 2
    assert all(parameter.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize("warmup_share", [0.0, 0.3])
def test_learning_rate_warms_up_and_then_follows_a_cosine_to_zero(draft, warmup_share):
    candidates = [Candidate("", new_head(), W_REJ)]
    options = {"total_steps": 20, "steps_per_epoch": 20, "w_acc": W_ACC}
    module = HeadTraining(candidates, draft, lr=0.5, warmup_share=warmup_share, **options)
    made = module.configure_optimizers()
    assert type(made["optimizer"]) is torch.optim.AdamW
    rates = []
    for _ in range(20):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    warm = int(20 * warmup_share)
    rise = [0.5 * step / warm for step in range(warm)]
    fall = [0.25 * (1 + np.cos(np.pi * (step - warm) / (20 - warm))) for step in range(warm, 20)]
    assert rates == pytest.approx(rise + fall, abs=1e-9)


# --- a sweep of heads -----------------------------------------------------------------------------------------------


def sweep_of_heads(predicts, seed=0):
    """Heads of several depths and loss weights, each made as it would be alone."""
    candidates = []
    for depth in (0, 2, 4):
        for w_rej in (1.0, 6.0):
            head = new_head(predicts, depth=depth, seed=seed)
            candidates.append(Candidate(f"depth{depth}-w_rej{w_rej:g}", head, w_rej))
    return candidates


@pytest.mark.parametrize("predicts", ["token", "both", "signals"])
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_each_head_of_a_sweep_has_the_bits_of_the_head_trained_alone(draft, traces, predicts, micro_batch_size):
    together = sweep_of_heads(predicts)
    module = fit(together, draft, traces, steps=4, micro_batch_size=micro_batch_size)
    for candidate, alone in zip(together, sweep_of_heads(predicts), strict=True):
        options = {"w_rej": alone.w_rej, "steps": 4, "micro_batch_size": micro_batch_size}
        other = fit(alone.head, draft, traces, **options)
        for name, tensor in alone.head.state_dict().items():
            assert torch.equal(candidate.head.state_dict()[name], tensor), (candidate.name, name)
        assert other.trainer.global_step == module.trainer.global_step == 4


@pytest.mark.parametrize("predicts", ["token", "both"])
def test_train_quality_is_the_unweighted_kl_over_the_last_epoch(draft, traces, predicts):
    """At a learning rate of nothing it is the dev quality on the same traces, packed exactly as well."""
    heads = sweep_of_heads(predicts)
    module = fit(heads, draft, traces, steps=3, total_steps=3, micro_batch_size=2, lr=1e-30)
    validate = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    options = {"packing": "exact", "r": 0.5, "epochs": 1, "batch_size": 8, "seed": 0}
    validate.validate(module, TraceData(traces, traces, micro_batch_size=3, **options), verbose=False)
    for index in range(len(heads)):
        for prediction, dev in module.dev_quality[index].items():
            train = module.train_quality(index)[prediction]
            assert train["count"] == dev.count
            assert train["binary_kl"] == pytest.approx(dev.binary_kl, rel=1e-4)


def test_train_quality_counts_no_epoch_but_the_last(draft, traces):
    positions = sum(response for _, response in LENGTHS)
    for steps in (2, 3):  # of 3
        module = fit(new_head("token"), draft, traces, steps=steps, total_steps=3)
        assert module.train_quality(0)["token"]["count"] == (positions if steps == 3 else 0)


@pytest.mark.parametrize(
    ("strong", "weak", "taken"),
    [
        (0.500, 0.490, 0.0),  # it saves a further hundredth and more
        (0.500, 0.497, 8.0),
        (0.500, None, 8.0),
        (None, 0.590, 0.0),  # only this one is better than the base
        (None, None, None),
    ],
)
def test_a_weak_decay_is_taken_where_it_pays(draft, strong, weak, taken):
    def of(kl):
        others = dict.fromkeys(("constant_kl", "brier", "ece", "auroc", "mean_predicted", "mean_observed"), 0.5)
        return {"token": Quality(count=9, binary_kl=kl, **others)}

    heads = [new_head("token") for _ in range(2)]
    base = Outcome("", new_head("token"), of(0.6), {}, of(0.6))
    candidates = [Candidate("", head, W_REJ, base, decay) for head, decay in zip(heads, (8.0, 0.0), strict=True)]
    options = {"lr": 1e-3, "total_steps": 4, "steps_per_epoch": 2, "warmup_share": 0.0, "w_acc": W_ACC, "keep": "best"}
    module = HeadTraining(candidates, draft, **options)
    for index, kl in enumerate((strong, weak)):
        module.dev_quality[index] = of(kl or 0.599)  # which is no hundredth less than 0.6
        module.best.judge(index, module.dev_quality[index])
    (made,) = module.outcomes()
    assert made.decay == taken
    assert made.head is (base.head if taken is None else heads[[8.0, 0.0].index(taken)])


@pytest.mark.parametrize("steps_per_epoch", [2, 50])
def test_an_epoch_at_the_peak_of_lr_takes_away_as_much_whatever_its_steps(draft, steps_per_epoch):
    head = new_head()
    options = {"lr": 1e-3, "total_steps": 10**6, "steps_per_epoch": steps_per_epoch, "warmup_share": 0.0}
    module = HeadTraining([Candidate("", head, W_REJ, decay=3.0)], draft, **options, w_acc=W_ACC)
    before = head.output.weight.detach().clone()
    optimizer = module.configure_optimizers()["optimizer"]
    for _ in range(steps_per_epoch):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    torch.testing.assert_close(head.output.weight, math.exp(-3.0) * before)
