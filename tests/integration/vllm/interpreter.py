"""vLLM's second model runner, V2, on a CPU: its Triton kernels run in Triton's interpreter. Slow, but the same code.

vLLM chooses the runner at import, so V2 needs its own process:

    answer = in_interpreter(function, arguments that JSON can say)

calls a function of a test module in such a process. `engine` makes an engine there, and `decode` is such a function for
plain decoding. A process takes 20 to 30 s before its first token, mostly for imports. Then it decodes 10 to 20 tokens a
second when greedy and 3 to 6 when sampling, all requests together.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "async_scheduling": False,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.5,  # of the memory, on a CPU; other programs run beside the tests
    "seed": 0,
}


def in_interpreter(function: Callable[..., Any], timeout: float = 500, **arguments: Any) -> Any:
    """Call `function(**arguments)` in a fresh process where vLLM uses V2, and return its result.

    function: one of a module's own, found there by name. arguments and result: what JSON can say. timeout: seconds.
    Raises AssertionError with the end of what the process printed when it fails. Skips the test where vLLM is not built
    for CPUs.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("Triton's interpreter stands in for a GPU only where vLLM is built for CPUs")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.vllm.interpreter", str(answer)],
            input=json.dumps(request),
            env={**os.environ, **ENVIRONMENT},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return json.loads(answer.read_text())


def engine(**options: Any) -> Any:
    """A vllm.LLM with V2, in this process. options: its arguments, over DEFAULTS."""
    from vllm import LLM

    if "speculative_config" in options:
        options.setdefault("per_request_spec_decode_metrics", "detailed")
    llm = LLM(**{**DEFAULTS, **options})
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    return llm


def decode(llm: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """To be called in the interpreter's process: one engine, some calls of `generate`.

    llm: options of `engine`. runs: `prompts` (lists of token ids) and `sampling` (arguments of SamplingParams) of each.
    Returns for each run, a list with one entry a prompt: `outputs` (new token ids), and with speculation `drafted` and
    `accepted` (tokens in each round).
    """
    made = engine(**llm)
    return [generate(made, **run) for run in runs]


def generate(llm: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
    done = [output.outputs[0] for output in llm.generate(inputs, SamplingParams(**sampling), use_tqdm=False)]
    result: dict[str, Any] = {"outputs": [list(output.token_ids) for output in done]}
    if llm.llm_engine.vllm_config.speculative_config is not None:
        result["drafted"] = [output.spec_decode_metrics.per_step_drafted for output in done]
        result["accepted"] = [output.spec_decode_metrics.per_step_accepted for output in done]
    return result


def pretend_triton_has_a_cpu_backend() -> None:
    """vLLM for CPUs uses Triton only if it has such a backend. The interpreter needs none; it runs the Python."""
    import triton.backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def keep_broadcast_comparisons_boolean() -> None:
    """Triton 3.9's interpreter makes integers of a comparison's result when it spreads a scalar one over a block, and
    then refuses them as a mask; vLLM's kernel that draws draft tokens does that."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_splat = InterpreterBuilder.create_splat

    def splat(self: Any, block_type: Any, scalar: Any) -> Any:
        made = create_splat(self, block_type, scalar)
        return TensorHandle(made.data.astype(bool), made.dtype) if scalar.data.dtype == bool else made

    InterpreterBuilder.create_splat = splat


def supply_log1p() -> None:
    """The interpreter has none of a GPU's own functions; vLLM's rejection sampler uses this one."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):  # −inf at −1 and nan below, as on a GPU
            return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p


def complete_the_interpreter() -> None:
    """To be called before vLLM is imported."""
    pretend_triton_has_a_cpu_backend()
    keep_broadcast_comparisons_boolean()
    supply_log1p()


def main() -> None:
    complete_the_interpreter()
    request = json.load(sys.stdin)
    function = getattr(importlib.import_module(request["module"]), request["name"])
    Path(sys.argv[1]).write_text(json.dumps(function(**request["arguments"])))


if __name__ == "__main__":
    main()
