"""Two tensor-parallel ranks draft alike and finish. Greedy output equals that of two ranks without speculation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accept_head.inference.adapters.vllm.metrics import FOLDER

REPOSITORY = Path(__file__).parents[3]
# A rank a core; vLLM would look for a NUMA node a rank.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
RANKS = 2


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < RANKS, reason="each rank needs a core")
def test_ranks_agree(embedded_pair_folder: Path, prompts: Any, tmp_path: Path) -> None:
    plain = decode(tmp_path, embedded_pair_folder, prompts[::20], None)
    drafted = decode(tmp_path, embedded_pair_folder, prompts[::20], f"head:{embedded_pair_folder}/heads/sampled:0.5")
    assert drafted["outputs"] == plain["outputs"]
    counts = drafted["metrics"]
    verified = counts["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < verified
    assert verified < 6 * counts["vllm:spec_decode_num_drafts"]  # rounds did end early
    assert counts["vllm:accept_head_num_verified_tokens"] == verified  # one rank counts, not both


def decode(folder: Path, pair: Path, prompts: Any, policy: str | None) -> Any:
    request, answer = folder / "request.json", folder / "answer.json"
    # An engine of another test leaves the folders of its own figures in this process's environment.
    theirs = ("PROMETHEUS_MULTIPROC_DIR", FOLDER)
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    request.write_text(json.dumps({"pair": str(pair), "prompts": prompts, "policy": policy, "answer": str(answer)}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.vllm.test_parallel", str(request)],
        env=environment | ENVIRONMENT,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return json.loads(answer.read_text())


def main() -> None:
    """In a process of its own, whose children are the ranks."""
    import time

    from vllm import LLM, SamplingParams

    request = json.loads(Path(sys.argv[1]).read_text())
    options: dict[str, Any] = {}
    if request["policy"] is not None:
        draft = {"method": "draft_model", "model": request["pair"] + "/draft", "num_speculative_tokens": 6}
        options["speculative_config"] = {**draft, "draft_tensor_parallel_size": RANKS}
        options["additional_config"] = {"accept_head": {"policy": request["policy"]}}
    llm = LLM(
        model=request["pair"] + "/target",
        tensor_parallel_size=RANKS,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=512,
        disable_log_stats=False,
        async_scheduling=False,
        **options,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = llm.generate(inputs, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    until = time.monotonic() + 30
    while True:  # the worker's own counts come out within a second or two
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        ours = metrics.get("vllm:accept_head_num_verified_tokens")
        if ours == metrics.get("vllm:spec_decode_num_draft_tokens") or time.monotonic() > until:
            break
        time.sleep(0.2)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    Path(request["answer"]).write_text(json.dumps({"outputs": ids, "metrics": metrics}))


if __name__ == "__main__":
    main()
