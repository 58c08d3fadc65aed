"""Decoders of a small pair, and the output of their runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from accept_head import Sampling
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.fixed import FixedPolicy
from tests.inference.support.toy import VOCAB, one_layer_pair, ragged_prompts

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
