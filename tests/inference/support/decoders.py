"""Every policy for a small pair, decoders of it, and the output of their runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from accept_head import Sampling
from accept_head.calibration import DepthCalibration
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference import generate, make_policy
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.pair import input_embeddings
from tests.inference.support.toy import VOCAB, one_layer_pair, ragged_prompts, random_head

LLAMA = one_layer_pair()
SAMPLED, GREEDY = Sampling(temperature=1.5, top_k=20), Sampling(temperature=0)
PROMPTS = [prompt[:12] for prompt in ragged_prompts(5)]
ENDS = (7, 14)
MOST = 4  # draft tokens


def new_decoder(compile="none", *, batch=2, most=MOST, sampling=SAMPLED):
    options = {"batch_size": batch, "greedy": sampling.greedy, "compile": compile}
    return make_decoder(*LLAMA, make_requests(PROMPTS, 12, range(5)), FixedPolicy(most), **options)


def run(
    decoder,
    policy,
    *,
    sampling=SAMPLED,
    ends=ENDS,
    seed=0,
    tokens=10,
    verifier="ratio",
    prompts=PROMPTS,
    live=None,
):
    """Tokens, and what they cost, of each prompt. live: a list, to which the number of live rows is added each round; a
    run then has 30 rounds at most."""

    def watch(round_):
        live.append(int(round_.outcome.live.sum()))
        if len(live) > 30:
            raise RuntimeError("it does not end")

    done = decoder.run(
        make_requests(prompts, tokens, range(len(prompts))),
        policy=policy,
        processing=Processing(sampling, VOCAB),
        stopping=Stopping(ends, [], torch.device("cpu")),
        seed=seed,
        verifier=verifier,
        watch=None if live is None else watch,
    )
    found = [(each.request.index, each.token_ids, replace(each.stats, seconds=0.0)) for each in done]
    return sorted(found, key=lambda each: each[0])


def decode(models, policy, prompts, **options):
    """(tokens, statistics but for the clock) of each prompt, two at a time."""
    options = {
        "sampling": SAMPLED,
        "max_new_tokens": 14,
        "end_token_ids": [7, 14, 20],
        "batch_size": 2,
        "seed": 3,
        "allow_lossy": True,
        **options,
    }
    result = generate(*models, prompts, policy=policy, **options)
    stats = [replace(each, seconds=0.0) for each in result.stats]
    return list(zip(result.tokens, stats, strict=True))


# --- policies ---------------------------------------------------------------------------------------------------------

COSTS = PairCosts.constant(ForwardCosts(t_draft=0.2, t_target=1.0))
AFFINE = DepthCalibration(method="affine", slopes=(0.5, 2.0), intercepts=(0.2, -0.2))


def eager(policy):
    """It learns every other round, so that a short text tells."""
    for learner in ("recalibration", "estimator"):
        if getattr(policy, learner, None):
            getattr(policy, learner).INTERVAL = 2
    return policy


def named(spec):
    return lambda draft: eager(make_policy(f"{spec},k_max=5", draft))


def head(kind=HeadPolicy, reads="drawn", predicts="token", **options):
    def make(draft):
        table = input_embeddings(LLAMA[1])
        made = random_head(32, depth=2, signals=True, reads=reads, predicts=predicts, embeddings=table)
        return eager(kind(made.to(draft.device).attach(input_embeddings(draft)), 0.7, k_max=5, **options))

    return make


def online(**options):
    return head(RecalibratedHeadPolicy, **{"online": True, **options})


def with_base(**config):
    return lambda draft: HeadPolicy(random_head(32, base=True, **config).to(draft.device), 0.6, k_max=5)


# Of a draft. All but `bandit`, which goes by the clock.
POLICIES = {
    "none": lambda draft: FixedPolicy(0),
    "fixed": lambda draft: FixedPolicy(3),
    "leviathan": named("leviathan:0.1"),
    "hf-heuristic": named("hf-heuristic:3"),
    "hf-confidence": named("hf-confidence:0.4"),
    "confidence": named("confidence:0.4"),
    "cumulative-confidence": named("cumulative-confidence:0.2"),
    "max-prob": named("max-prob:0.6,k_min=2"),
    "max-prob-mean": named("max-prob-mean:0.6"),
    "entropy": named("entropy:1.0"),
    "svip": named("svip:0.4"),
    "adaedl": named("adaedl:0.4"),
    "online-logistic": named("online-logistic:0.4"),
    "online-signals": named("online-signals:0.6"),
    "dsde": named("dsde:3,calibration=2"),
    "batch-map": lambda draft: BatchMapPolicy([(1, 1, 4), (2, 8, 2)]),
    "goodput": lambda draft: GoodputPolicy(COSTS, k_max=5, probe=2),
    "budget": lambda draft: eager(BudgetPolicy(COSTS, k_max=5)),
    "budget retrospective": lambda draft: eager(BudgetPolicy(COSTS, k_max=5, retrospective=True)),
    "adaspec": lambda draft: AdaSpecPolicy(COSTS, k_max=5, probe=2),
    "costs": named("max-prob:0.05,costs=0.2"),
    "head": head(),
    "head lag 0": head(lag=0),
    "head before": head(reads="before"),
    "head gain": head(reads="before", predicts="both"),
    "base alone": with_base(),
    "head with a base": with_base(width=20),
    "head calibrated": head(RecalibratedHeadPolicy, calibration=AFFINE),
    "head online": online(),
    "head online, before": online(reads="before", predicts="both"),
    "head trains": online(reads="before", train=True),
}
