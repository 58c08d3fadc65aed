"""A correction of vLLM on a CPU, without which sampled output (temperature > 0) under speculation is wrong.

The rejection sampler spreads each request's temperature, top-k and top-p over the request's draft tokens. Without
Triton a C++ function does that. It gets an int64 copy of the output, and nothing copies the result back. So for float32
and int32 the caller reads uninitialised memory, and divides the target's logits by it. Greedy-only batches are not
affected; greedy requests beside sampled ones are.
"""

from __future__ import annotations

from torch import Tensor

KNOWN_WRONG = ("0.32.0", "0.33.0")  # by its source, which is the same
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def apply() -> bool:
    """Replace the C++ function by `expand` if it is in use and known to be wrong → whether it was replaced.

    Call it after the worker has registered its platform's kernels: before, there is nothing to replace. One line goes
    to vLLM's log. Nothing is replaced on a GPU, with Triton, in other versions of vLLM, or a second time.
    """
    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    version = vllm.__version__.split("+")[0]
    if not current_platform.is_cpu() or version not in KNOWN_WRONG or not _cpp_function_in_use():
        return False
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    register_kernels({KERNEL: expand})
    # Each further engine in this process registers the platform's kernels again, for all engines.
    cpu_triton_utils._expand_kernel_impl = expand
    # vLLM shows only its own loggers and their children.
    init_logger("vllm.accept_head").info(
        "accept_head replaced the CPU kernel that spreads temperature, top-k and top-p over draft tokens: vLLM %s "
        "leaves its output uninitialised",
        version,
    )
    return True


def _cpp_function_in_use() -> bool:
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl
    from vllm.v1.sample import rejection_sampler

    in_use = getattr(rejection_sampler.expand_kernel, "func", None)  # a Triton kernel has none
    return in_use is _expand_kernel_impl and in_use is not expand


def expand(
    output_ptr: Tensor,
    input_ptr: Tensor,
    cu_num_tokens_ptr: Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,
) -> None:
    """Write each request's value once for each of its tokens, as vLLM's Triton kernel `expand_kernel` does.

    output_ptr: (tokens,), written in place. input_ptr: (requests,), of the same dtype (float32, int32 or int64).
    cu_num_tokens_ptr: (requests,) int, tokens up to and including each request; a request may have none.
    replace_from, replace_to: a value equal to the first is written as the second.
    MAX_NUM_TOKENS: the Triton kernel's block size; unused here. vLLM passes arguments by these names.
    """
    ends = cu_num_tokens_ptr.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = input_ptr.masked_fill(input_ptr == replace_from, replace_to).repeat_interleave(counts)
    output_ptr[: len(values)].copy_(values)
