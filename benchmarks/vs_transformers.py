"""Question: how much faster is our loop than transformers' assisted generation, with the same policy?

Same pair, prompts, greedy decoding, float32, batch 1; per prompt the two run one after the other, in alternating order.
The outputs must be equal, and so must the numbers of draft and target forwards: it is the same policy. transformers
re-tunes its confidence threshold when scikit-learn is there; that is switched off, so that both keep the same one.
transformers refuses assisted generation beyond batch 1: the batch-8 column compares with its plain greedy batch.

python benchmarks/vs_transformers.py    # eager, and compiled with max-autotune
python benchmarks/vs_transformers.py --real --dtype float32 --prompts 50 --compile none    # the published pair
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers.generation.candidate_generator as candidate_generator
from measured_pair import add_options, loaded
from record import write_result
from transformers.utils import logging

from accept_head import Sampling
from accept_head.command.allocator import keep_freed_blocks
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Finished, Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.pair import Pair, end_ids

NEW_TOKENS, FEWER = 64, 32  # of the embedded and of the published pair
K_MAX = 8
REAL_POLICIES: dict[str, dict[str, Any]] = {
    "fixed:3": {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0},
}
POLICIES: dict[str, dict[str, Any]] = {  # ours → transformers' settings of the assistant
    "fixed:2": {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.0},
    "fixed:4": {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0},
    "fixed:8": {"num_assistant_tokens": 8, "assistant_confidence_threshold": 0.0},
    f"confidence:0.4,k_max={K_MAX}": {"num_assistant_tokens": K_MAX, "assistant_confidence_threshold": 0.4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, prompts=40)
    parser.add_argument("--compile", nargs="*", default=["none", "max-autotune"])
    options = parser.parse_args()
    keep_freed_blocks()
    logging.set_verbosity_error()
    candidate_generator.is_sklearn_available = lambda: False
    pair, prompts = loaded(options)
    requests = make_requests([prompt.ids for prompt in prompts], FEWER if options.real else NEW_TOKENS)
    rows = []
    for mode in options.compile:
        decoder = make_decoder(
            pair.target,
            pair.draft,
            requests,
            make_policy(f"fixed:{K_MAX}", pair),
            batch_size=1,
            greedy=True,
            compile=mode,
        )
        for spec, settings in (REAL_POLICIES if options.real else POLICIES).items():
            rows.append({"compile": mode, **side_by_side(pair, decoder, requests, spec, settings)})
            row = rows[-1]
            print(
                f"{mode:12} {spec:24} ours {row['ours_tokens_per_second']:.0f} tokens/s, transformers "
                f"{row['transformers_tokens_per_second']:.0f}: ratio {row['ratio']:.2f} "
                f"({row['ratio_ci95'][0]:.2f} to {row['ratio_ci95'][1]:.2f}), equal output: {row['equal_output']}"
            )
    result = {"prompts": len(requests), "dtype": str(pair.target.dtype).removeprefix("torch."), "rows": rows}
    if not options.real:
        result["batch8"] = batch_of_eight(pair, requests)
        print(result["batch8"])
    kind = "_real" if options.real else ""
    kind += "_float32" if options.real and result["dtype"] == "float32" else ""
    path = write_result(f"vs_transformers{kind}", result)
    print(f"wrote {path}")


def side_by_side(
    pair: Pair, decoder: Decoder, requests: list[Request], spec: str, settings: dict[str, Any]
) -> dict[str, Any]:
    for name, value in {**settings, "num_assistant_tokens_schedule": "constant"}.items():
        setattr(pair.draft.generation_config, name, value)
    ends = end_ids(pair.target, pair.tokenizer)

    def theirs(request: Request) -> list[int]:
        ids = torch.tensor([request.prompt])
        output = pair.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=pair.draft,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
        return output[0, len(request.prompt) :].tolist()

    def ours(request: Request) -> list[int]:
        return run(decoder, pair, [request], spec)[0].token_ids

    warm_up = requests[:2]
    calls = {"transformers": forward_calls(pair, theirs, warm_up), "ours": our_calls(decoder, pair, warm_up, spec)}
    times, tokens, equal = [], 0, True
    again = []  # ours against ours: the noise floor
    for index, request in enumerate(requests):
        order = (ours, theirs) if index % 2 else (theirs, ours)
        answers = {}
        spent = {}
        for call in order:
            begin = time.perf_counter()
            answers[call] = call(request)
            spent[call] = time.perf_counter() - begin
        begin = time.perf_counter()
        ours(request)
        again.append((spent[ours], time.perf_counter() - begin))
        times.append((spent[theirs], spent[ours]))
        tokens += len(answers[ours])
        equal &= answers[ours] == answers[theirs]
    return {
        "policy": spec,
        "ratio": ratio(times),
        "ratio_ci95": bounds(times),
        "noise_floor": ratio(again),
        "ours_tokens_per_second": tokens / sum(mine for _, mine in times),
        "transformers_tokens_per_second": tokens / sum(other for other, _ in times),
        "equal_output": equal,
        "forwards_of_two_prompts": calls,
    }


def run(decoder: Decoder, pair: Pair, requests: list[Request], spec: str) -> list[Finished]:
    finished = decoder.run(
        requests,
        policy=make_policy(spec, pair),
        processing=Processing(Sampling(temperature=0), pair.vocab_size),
        stopping=Stopping(end_ids(pair.target, pair.tokenizer), [], pair.target.device),
    )
    return sorted(finished, key=lambda done: done.request.index)


def forward_calls(pair: Pair, call: Callable[[Request], list[int]], requests: list[Request]) -> dict[str, int]:
    """How often each model is run; the target's prefill, which transformers joins with the first round, included."""
    counts = {"draft": 0, "target": 0}
    hooks = [
        model.register_forward_hook(lambda *_, name=name: counts.__setitem__(name, counts[name] + 1))
        for name, model in (("draft", pair.draft), ("target", pair.target))
    ]
    for request in requests:
        call(request)
    for hook in hooks:
        hook.remove()
    return counts


def our_calls(decoder: Decoder, pair: Pair, requests: list[Request], spec: str) -> dict[str, int]:
    stats = [done.stats for done in run(decoder, pair, requests, spec)]
    return {"draft": sum(row.draft_forwards for row in stats), "target": sum(row.rounds for row in stats)}


def batch_of_eight(pair: Pair, requests: list[Request]) -> list[dict[str, Any]]:
    """Eight rows at a time, and transformers' plain greedy decoding of the same prompts, padded on the left."""
    ends, pad = end_ids(pair.target, pair.tokenizer), 0
    groups = [requests[start : start + 8] for start in range(0, len(requests), 8)]

    def theirs() -> list[list[int]]:
        answers = []
        for group in groups:
            width = max(len(request.prompt) for request in group)
            ids = torch.tensor([[pad] * (width - len(r.prompt)) + list(r.prompt) for r in group])
            mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in group])
            output = pair.target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=pad,
            )
            answers += [cut(row, ends) for row in output[:, width:].tolist()]
        return answers

    rows = []
    for spec in ("fixed:1", "fixed:2", "fixed:4"):
        decoder = make_decoder(pair.target, pair.draft, requests, make_policy(spec, pair), batch_size=8, greedy=True)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            mine = [done.token_ids for done in run(decoder, pair, requests, spec)]
            middle = time.perf_counter()
            other = theirs()
            times.append((time.perf_counter() - middle, middle - begin))
        tokens = sum(len(row) for row in mine)
        rows.append(
            {
                "policy": spec,
                "ours_tokens_per_second": tokens / np.median([mine for _, mine in times]),
                "transformers_greedy_tokens_per_second": tokens / np.median([other for other, _ in times]),
                "ratio": ratio(times),
                "equal_output": mine == other,
            }
        )
    return rows


def cut(row: list[int], ends: list[int]) -> list[int]:
    places = [index for index, token in enumerate(row) if token in ends]
    return row[: places[0] + 1] if places else row


def ratio(times: list[tuple[float, float]]) -> float:
    return sum(other for other, _ in times) / sum(mine for _, mine in times)


def bounds(times: list[tuple[float, float]]) -> list[float]:
    """95 % bootstrap interval of the ratio, over prompts."""
    sums = draws(len(times)) @ np.array(times)
    return interval(sums[:, 0] / sums[:, 1])


if __name__ == "__main__":
    main()
