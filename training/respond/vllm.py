"""Target responses by vLLM in this process: whole shards at once, token ids in and out.

Every request has its own seed, so a response depends neither on other requests nor on the number of workers. The
engine's arithmetic is an exception: kernels may round differently in another batch, and that can decide a tie.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accept_head.errors import InputError
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.launch import use_cpu_only
from accept_head.training.respond.request import EngineRequest
from accept_head.training.respond.responder import Batch, answered

# Variables that a launcher sets for its processes. The engine's own processes must not see them.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

MISSING = (
    "--backend vllm: the package vllm is not installed here; pip install 'accept-head[vllm]', or run a vLLM server "
    "anywhere and use --backend openai"
)


def check_options(tensor_parallel_size: int | None, gpu_memory_utilization: float | None) -> None:
    """Raises InputError naming the option that is wrong."""
    if tensor_parallel_size is not None and tensor_parallel_size < 1:
        raise InputError(f"tensor_parallel_size is {tensor_parallel_size}, expected a positive integer")
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization is {gpu_memory_utilization}, expected a number in (0, 1]")


def is_installed() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # a folder of that name, without the package, has no origin


class VllmResponder:
    """Generates with an engine in this process.

    tensor_parallel_size: GPUs that share the target. Each of several processes on a host uses this number of its own.
    gpu_memory_utilization: share of each GPU that the engine may take. Our own copy of the target, which scores, is
    there too.
    """

    def __init__(
        self,
        pair: Pair,
        config: TraceConfig,
        *,
        longest: int,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        trust_remote_code: bool = False,
    ):
        self.request = EngineRequest.of(pair, config)
        self.batch_size, self.drawn_with = config.batch_size, config.sampling
        self.tensor_parallel_size = tensor_parallel_size
        self.options: dict[str, Any] = {
            "model": config.target,
            "dtype": str(pair.target.dtype).removeprefix("torch."),  # scoring and drawing need the same dtype
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": longest + config.max_new_tokens,
            "generation_config": "vllm",
            "trust_remote_code": trust_remote_code,
            "seed": 0,  # for requests without one
        }
        if not use_cpu_only():
            self.options["gpu_memory_utilization"] = gpu_memory_utilization
        self.llm: Any = None

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        from vllm import SamplingParams, TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=list(prompt.ids)) for prompt in prompts]
        params = [SamplingParams(detokenize=False, **self._fields(prompt.index)) for prompt in prompts]
        outputs = self._engine().generate(inputs, params, use_tqdm=False)
        said = [
            self.request.checked(output.outputs[0].token_ids, prompt.index, "vLLM")
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        yield from answered(prompts, said, self.batch_size)

    def _fields(self, index: int) -> dict[str, Any]:
        fields = self.request.fields(index)
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        return fields

    def _engine(self) -> Any:
        if self.llm is None:
            from vllm import LLM

            with engine_environment(self.tensor_parallel_size):
                self.llm = LLM(**self.options)
        return self.llm

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None


@contextmanager
def engine_environment(devices: int) -> Iterator[None]:
    """The environment in which the engine starts its processes: no launcher variables, only this rank's GPUs."""
    saved = dict(os.environ)
    rank, world = int(saved.get("LOCAL_RANK", 0)), int(saved.get("WORLD_SIZE", 1))
    try:
        if world > 1:
            for name in LAUNCHER:
                os.environ.pop(name, None)
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # this process already belongs to a process group
            if not use_cpu_only():
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_devices(rank, devices))
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _own_devices(rank: int, count: int) -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    mine = names[rank * count : (rank + 1) * count]
    if len(mine) < count:
        raise InputError(
            f"tensor_parallel_size is {count}, but of this host's {len(names)} GPUs {len(mine)} are left for process "
            f"{rank}; launch fewer processes"
        )
    return mine
