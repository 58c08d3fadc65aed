"""The policy shown in docs/policies.md, registered in this process before the engine is made."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from accept_head.inference.policies.registry import POLICIES
from accept_head.inference.policies.spec import named
from tests.integration.vllm.engines import at_most, drafter_of, our_rounds, use

K_MAX, NEW_TOKENS = 8, 40


@pytest.fixture(scope="module")
def mine(my_policy):
    """Its name, as long as these tests run."""
    named("mine", "", "stop after a token that is much less likely than those before it")(my_policy)
    yield "mine"
    del POLICIES["mine"]


@pytest.fixture(scope="module")
def llm(make_llm, mine):
    return make_llm(
        {"num_speculative_tokens": K_MAX},
        max_num_seqs=16,
        additional_config={"accept_head": {"policy": mine}},
        per_request_spec_decode_metrics="detailed",
    )


def test_the_engine_asks_it_and_decodes_as_without_it(llm, make_llm, my_policy, prompts, generate):
    host = drafter_of(llm).host
    assert type(host.policy) is my_policy
    sampling = {"temperature": 0.0, "max_tokens": NEW_TOKENS}
    assert generate(llm, prompts[:32], **sampling) == generate(make_llm(max_num_seqs=16), prompts[:32], **sampling)
    counts = host.metrics.read()
    assert counts["accepted"] > 100 and counts["row_rounds"]["policy"] > 10, "it must have stopped by itself"
    assert 0.3 <= host.policy.share <= 0.7


def test_its_rounds_are_those_of_our_own_loop(llm, mine, prompts, embedded_pair):
    """One request at a time, each with a policy that is new: what it learns is of all rows. Near the end of a response
    our loop drafts less."""
    at_most(llm, 1)
    compared = 0
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt in prompts[::20]:
        use(llm, mine)
        (output,) = (done.outputs[0] for done in llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False))
        said = output.spec_decode_metrics
        theirs = list(zip(said.per_step_drafted, said.per_step_accepted, strict=True))
        # vLLM's first token comes with the prompt and without a draft.
        (ours,) = our_rounds(embedded_pair, [[*prompt, output.token_ids[0]]], mine, new_tokens=NEW_TOKENS, batch=1)
        length = 0
        for round_ours, round_theirs in zip(ours, theirs, strict=False):
            if length + 2 * (K_MAX + 1) > NEW_TOKENS:
                break
            assert round_ours == round_theirs
            length += round_ours[1] + 1
            compared += 1
    assert compared > 40
