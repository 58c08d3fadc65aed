"""The tenant of a row, from its prompt to the learning from it: in our loop, in transformers, in a host like vLLM's."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from accept_head import InputError
from accept_head.cli import main
from accept_head.inference import generate, make_policy
from accept_head.inference.adapters.transformers import generate as custom_generate
from accept_head.inference.adapters.vllm.host import PolicyHost, Verdict
from accept_head.inference.decode.generate import make_requests
from accept_head.prompts import load_prompts
from tests.inference.support.foreign import Engine
from tests.inference.support.toy import labels_by_tenant, random_head, toy_pair

# More prompts than rows, and rows that end at different times; "" is nobody's.
TENANTS = ["ann", "bob", "", "ann", "eve", "bob", "ann", "", "eve", "ann"]
PROMPTS = [[index % 5] * (2 + index) for index in range(len(TENANTS))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    random_head(16, reads="before").save_pretrained(folder)
    return folder


def policy_of(saved, options="per_tenant=true", **more):
    return make_policy(f"head:{saved}:0.9,online=true,half_life=inf,k_max=4,{options}", toy_pair().draft, **more)


def decode(policy, tenants, **options):
    """→ tokens of each tenant whose acceptance verification told, counted from outside."""
    pair, told = toy_pair(), Counter()

    def watch(round_):
        for request, live, judged in zip(
            round_.rows.requests, round_.outcome.live.tolist(), round_.outcome.judged.tolist(), strict=True
        ):
            if live:
                told[request.tenant] += judged

    generate(
        pair.target, pair.draft, PROMPTS, policy=policy, tenants=tenants, max_new_tokens=12, watch=watch, **options
    )
    return told


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize("options", ["per_tenant=true", "tenant_share=0.2", "per_tenant=true,costs=0.05"])
def test_each_tenant_teaches_by_its_own_rows(saved, options, batch_size):
    policy = policy_of(saved, options)
    told = decode(policy, TENANTS, batch_size=batch_size)
    assert labels_by_tenant(policy) == told and all(told.values())


def test_a_row_does_not_stay_its_last_tenants(saved):
    """Who is admitted without a name is nobody's, whoever had the row."""
    policy = policy_of(saved)
    told = decode(policy, ["ann"] + [""] * 9, batch_size=1)
    assert labels_by_tenant(policy) == told and told[""] > told["ann"]


def test_names_of_other_rows_would_be_noticed(saved):
    policy = policy_of(saved)
    told = decode(policy, TENANTS, batch_size=3)
    swapped = policy_of(saved)
    decode(swapped, TENANTS[::-1], batch_size=3)
    assert labels_by_tenant(swapped) != told


def test_a_policy_that_trusts_all_takes_them_for_one(saved):
    policy = policy_of(saved, "signals=false")
    told = decode(policy, TENANTS)
    assert labels_by_tenant(policy) == {"": sum(told.values())}


@pytest.mark.parametrize("options", ["per_tenant=true", "tenant_share=0.2", "per_tenant=true,costs=0.05"])
@pytest.mark.parametrize("tenants", [None, [""] * len(PROMPTS)])
def test_nobody_named_is_refused(saved, options, tenants):
    with pytest.raises(InputError, match="whose a prompt is"):
        decode(policy_of(saved, options), tenants)


def test_tenants_are_one_a_prompt():
    with pytest.raises(InputError, match="2 tenants and 1 prompts"):
        make_requests([[1]], 3, tenants=["a", "b"])


def test_policies_without_tenants_do_not_mind_them():
    assert decode("fixed:2", TENANTS) and decode("fixed:2", None)


def test_in_transformers(saved):
    pair, policy = toy_pair(), policy_of(saved)
    inputs = torch.tensor([[1, 2, 3], [3, 2, 1]])
    options = {"custom_generate": custom_generate, "draft": pair.draft, "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(InputError, match="whose a prompt is"):
        pair.target.generate(inputs, policy=policy, **options)
    pair.target.generate(inputs, policy=policy, tenants=["ann", "bob"], **options)
    learnt = labels_by_tenant(policy)
    assert learnt[""] == 0 and learnt["ann"] and learnt["bob"]


# --- prompts files ----------------------------------------------------------------------------------------------------


RECORDS = ({"tenant": "ann"}, {"domain": "maths"}, {"tenant": 7}, {"tenant": None, "domain": None})


def test_a_prompts_file_says_whose_prompts_are(tmp_path, embedded_pair):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "Hi", **more}) for more in RECORDS))
    prompts = load_prompts(str(file), embedded_pair.tokenizer)
    assert [(prompt.tenant, prompt.domain) for prompt in prompts] == [("ann", ""), ("", "maths"), ("7", ""), ("", "")]


def test_generate_reads_it_and_refuses_a_file_that_names_nobody(tmp_path, embedded_pair_folder, capsys):
    folder, file, out = embedded_pair_folder, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    spec = f"head:{folder / 'heads' / 'sampled'},online=true,per_tenant=true"
    words = ["--target", folder / "target", "--draft", folder / "draft", "--prompts", file, "--out", out]
    call = ["generate", *map(str, words), "--policy", spec, "--max_new_tokens", "4"]
    file.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    assert main(call) == 2
    assert "expected a field 'tenant'" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == [
        "prompts.jsonl"
    ]
    file.write_text('{"prompt": "One", "tenant": "ann"}\n{"prompt": "Two"}\n')
    assert main(call) == 0 and len(out.read_text().splitlines()) == 2


# --- a host of vLLM's kind --------------------------------------------------------------------------------------------


def hosted(policy, tenant_of):
    return PolicyHost(policy, rows=8, limit=4, device=torch.device("cpu"), greedy=False, tenant_of=tenant_of)


@pytest.mark.parametrize("options", ["per_tenant=true", "per_tenant=true,costs=0.05"])
def test_in_a_host_of_vllms_kind(saved, options):
    """Requests come, go and change places; nobody says whose "c" is."""
    policy, whose = policy_of(saved, options), {"a": "ann", "b": "bob", "d": "ann"}
    host = hosted(policy, lambda request: whose.get(request, ""))
    told, before, verdict = Counter(), None, None
    for number, requests in enumerate((["a", "b", "c"], ["a", "b", "c"], ["c", "a", "d"], ["d", "c"], ["d", "c"])):
        if before is not None:
            verdict = Verdict([before[1].get(name, 0) for name in requests], [0] * len(requests))
            for name in requests:
                if before[1].get(name):
                    told[whose.get(name, "")] += 1  # of a refused draft the first token is judged
        lengths, _ = Engine(len(requests), 4, number).round(host, requests, verdict=verdict)
        before = requests, dict(zip(requests, lengths, strict=True))
    learnt = labels_by_tenant(policy)
    assert {name: count for name, count in learnt.items() if count} == told and len(told) == 3


def test_a_host_that_cannot_know_refuses(saved):
    with pytest.raises(InputError, match="V2 model runner does not show whose"):
        hosted(policy_of(saved), None)
    hosted(policy_of(saved, "signals=false"), None)
