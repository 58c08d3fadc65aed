"""Arms of a benchmark that take turns in one engine of vLLM (benchmarks/vllm_engines.py): each has its own text."""

import pytest

from accept_head.inference.decode.generate import make_requests
from accept_head.sampling import Sampling

ROWS, GREEDY = 2, Sampling(temperature=0.0)
TEXTS = ["Once upon a time", "The little dog", "One day, Tom", "Lily saw a big", "A bird was"]


@pytest.mark.slow
def test_arms_in_turns_give_the_text_of_the_target(embedded_pair_folder, monkeypatch):
    from vllm_engines import Drafting, Engines

    limits = {"dtype": "float32", "max_model_len": 256, "gpu_memory_utilization": 0.3}
    target, draft = (str(embedded_pair_folder / name) for name in ("target", "draft"))
    engines = Engines(target, draft, k_max=4, rows=ROWS, **limits)
    requests = make_requests([engines.tokenizer()(text).input_ids for text in TEXTS], 40)
    alone = {each.request.index: each.token_ids for each in engines.run(Drafting(), requests, GREEDY, ROWS).finished}
    batches, make = [], engines._batch
    monkeypatch.setattr(engines, "_batch", lambda *run: batches.append(make(*run)) or batches[-1])

    def in_turns():
        drafting = [Drafting(), Drafting.fixed(2, ROWS), Drafting.fixed(4, ROWS), Drafting(policy="max-prob:0.5")]
        arms = [engines.rounds(each, requests, GREEDY, ROWS) for each in drafting]
        while arms:
            arms = [arm for arm in arms if next(arm, None) is not None]

    in_turns()
    texts = [{each.request.index: each.token_ids for each in batch.finished} for batch in batches]
    assert len(texts) == 4 and all(text == alone for text in texts)
    monkeypatch.setattr(engines, "_keeps", lambda engine: [])  # nothing is put aside
    with pytest.raises(KeyError):  # an arm gets the tokens of another
        in_turns()
