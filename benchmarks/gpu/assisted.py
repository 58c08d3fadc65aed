"""Our loop against transformers' assisted generation: the same pair, prompts and policy, one request at a time.

Per prompt the two run one after the other, in alternating order. Greedy outputs need not be equal in bf16, where
forwards of other widths round otherwise (greedy_divergence.py): how many are is said beside the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers.generation.candidate_generator as candidate_generator
from cells import Cell
from transformers.utils import logging
from vs_transformers import interval, ratio

from accept_head import Sampling
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Finished, Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.profile.device import finish
from accept_head.pair import Pair, end_ids
from accept_head.prompts import load_prompts

K_MAX = 20  # transformers' own default
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
# Ours → transformers' settings of the assistant. learns: whether it may re-tune its confidence by scikit-learn.
POLICIES: dict[str, dict[str, Any]] = {
    "fixed:2": {"num_assistant_tokens": 2, **CONSTANT},
    "fixed:4": {"num_assistant_tokens": 4, **CONSTANT},
    "fixed:8": {"num_assistant_tokens": 8, **CONSTANT},
    "hf-heuristic": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    },
    f"confidence:0.4,k_max={K_MAX}": {
        "num_assistant_tokens": K_MAX,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
    "hf-confidence": {
        "num_assistant_tokens": K_MAX,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
        "learns": True,
    },
}


def side_by_side(pair: Pair, file: str, *, temperature: float, new_tokens: int, prompts: int, mode: str) -> Cell:
    """Ratios of tokens/s, ours over transformers', of every policy that both have."""
    logging.set_verbosity_error()
    sampling = Sampling(temperature=temperature, top_k=50)
    loaded = load_prompts(file, pair.tokenizer, max_prompts=prompts)
    requests = make_requests([prompt.ids for prompt in loaded], new_tokens)
    decoder = make_decoder(
        pair.target,
        pair.draft,
        requests,
        make_policy(f"fixed:{K_MAX}", pair),
        batch_size=1,
        greedy=sampling.greedy,
        compile=mode,
    )
    rows = [_measure(pair, decoder, requests, spec, settings, sampling) for spec, settings in POLICIES.items()]
    return {"policies": rows, "least_ratio": min(row["ratio"] for row in rows), "prompts": len(requests)}


def _measure(
    pair: Pair, decoder: Decoder, requests: list[Request], spec: str, settings: dict[str, Any], sampling: Sampling
) -> dict[str, Any]:
    times: list[tuple[float, float]] = []
    tokens = {"ours": 0, "theirs": 0}
    equal = 0
    learns = settings.get("learns", False)
    for name, value in settings.items():
        if name != "learns":
            setattr(pair.draft.generation_config, name, value)
    sklearn = candidate_generator.is_sklearn_available
    candidate_generator.is_sklearn_available = sklearn if learns else lambda: False
    try:
        ours = _ours(pair, decoder, [requests[0], *requests], spec, sampling)
        for index, request in enumerate([requests[0], *requests]):  # the first is a warm-up
            calls: dict[str, Callable[[], list[int]]] = {"ours": lambda: next(ours).token_ids}
            calls["theirs"] = lambda r=request, i=index: _theirs(pair, r, sampling, seed=i)
            answers, spent = {}, {}
            for name in sorted(calls, reverse=bool(index % 2)):
                begin = time.perf_counter()
                answers[name] = calls[name]()
                finish(pair.target.device)
                spent[name] = time.perf_counter() - begin
            if index:
                times.append((spent["theirs"] / len(answers["theirs"]), spent["ours"] / len(answers["ours"])))
                tokens = {name: tokens[name] + len(answers[name]) for name in tokens}
                equal += answers["ours"] == answers["theirs"]
    finally:
        candidate_generator.is_sklearn_available = sklearn
    return {
        "policy": spec,
        "ratio": ratio(times),  # of seconds a token, so that sampled answers may have other lengths
        "ratio_ci95": interval(times),
        "ours_ms_a_token": 1e3 * sum(mine for _, mine in times) / len(times),
        "transformers_ms_a_token": 1e3 * sum(other for other, _ in times) / len(times),
        "tokens": tokens,
        "equal_outputs": equal if sampling.greedy else None,
    }


def _ours(
    pair: Pair, decoder: Decoder, requests: Sequence[Request], spec: str, sampling: Sampling
) -> Iterator[Finished]:
    """One request after the other, each begun when its answer is asked for, in one run, as a server's are."""
    return decoder.run(
        iter(requests),
        policy=make_policy(spec, pair),
        processing=Processing(sampling, pair.vocab_size),
        stopping=Stopping(end_ids(pair.target, pair.tokenizer), [], pair.target.device),
    )


def _theirs(pair: Pair, request: Request, sampling: Sampling, *, seed: int) -> list[int]:
    torch.manual_seed(seed)
    ids = torch.tensor([list(request.prompt)], device=pair.target.device)
    settings = {"do_sample": False} if sampling.greedy else {"do_sample": True, "temperature": 1.0, "top_k": 50}
    output = pair.target.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=pair.draft,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=end_ids(pair.target, pair.tokenizer),
        pad_token_id=pair.tokenizer.pad_token_id,
        **settings,
    )
    return output[0, len(request.prompt) :].tolist()
