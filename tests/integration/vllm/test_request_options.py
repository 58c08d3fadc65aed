"""What a request's vllm_xargs say (V1): its tenant, whose fit learns from it, and the most tokens to draft for it."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from accept_head import InputError
from accept_head.inference.adapters.vllm.settings import K_MAX, TENANT
from tests.inference.support.toy import labels_by_tenant
from tests.integration.vllm.engines import drafter_of, use

TENANTS = ["ann", "bob", None, "ann"] * 6


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm({}, max_num_seqs=5, additional_config={"accept_head": {"policy": "fixed:1"}})


def decode(llm, prompts, tenants):
    """Each request has its own tenant, or says nothing."""
    prompts = prompts[: len(tenants)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=16, extra_args={TENANT: tenant} if tenant else None)
        for tenant in tenants
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def head_of(folder, options):
    return f"head:{folder}/heads/greedy:1,rule=product,k_max=4,online=true,half_life=inf,{options}"


def labels_of(host):
    with torch.inference_mode():  # as the engine has it
        return labels_by_tenant(host.policy)


def test_requests_teach_their_own_tenants_fit(llm, prompts, embedded_pair_folder):
    """The tokens that a tenant teaches with others around are those that it teaches alone: greedy drafts and verdicts
    depend on no other row, as long as nothing learnt changes what is drafted, which the threshold sees to."""
    spec = head_of(embedded_pair_folder, "per_tenant=true")
    plain = decode(use(llm, None) or llm, prompts, [None] * len(TENANTS))
    host = use(llm, spec)
    assert decode(llm, prompts, TENANTS) == plain
    together = labels_of(host)
    assert set(together) == {"", "ann", "bob"} and all(together.values())
    for name in ("", "ann", "bob"):
        host = use(llm, spec)
        chosen = [prompt for prompt, tenant in zip(prompts, TENANTS, strict=False) if (tenant or "") == name]
        decode(llm, chosen, [name or None] * len(chosen))
        alone = labels_of(host)
        assert alone == {"": 0.0, name: together[name]}, name


def test_a_runner_that_does_not_show_them_is_refused(llm, embedded_pair_folder):
    from accept_head.inference.adapters.vllm.build import build_host

    use(llm, head_of(embedded_pair_folder, "tenant_share=0.1"))
    drafter = drafter_of(llm)
    with pytest.raises(InputError, match="V2 model runner does not show whose"):
        build_host(drafter.vllm_config, drafter.device, drafter.model)


def test_a_request_bounds_its_own_drafts(make_llm, prompts):
    """0 drafts nothing for it, beside others that are drafted. What is no number of tokens is no bound."""
    options = {
        "per_request_spec_decode_metrics": "detailed",
        "additional_config": {"accept_head": {"policy": "fixed:1"}},
    }
    llm = make_llm({}, max_num_seqs=4, **options)
    use(llm, "fixed:4")
    asked = [{K_MAX: 0}, {K_MAX: 2}, None, {K_MAX: "two"}, {K_MAX: -1}, {K_MAX: 9}] * 2
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[: len(asked)]]
    sampling = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args=each) for each in asked]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    plain = llm.generate(
        inputs, [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * len(asked), use_tqdm=False
    )
    longest = []
    for output, without in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == without.outputs[0].token_ids
        longest.append(max(output.outputs[0].spec_decode_metrics.per_step_drafted, default=0))
    assert longest == [0, 2, 4, 4, 4, 4] * 2
