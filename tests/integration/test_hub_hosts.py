"""All three hosts use a head from a Hub by its name. Greedy, each gives the target's own tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.hub_server import HubServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPO, NEW_TOKENS, PROMPTS = "user/tiny-sampled", 24, 6

TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
target, draft, prompts, repo, new_tokens, first = json.loads(sys.argv[1])
target, draft = (AutoModelForCausalLM.from_pretrained(name).eval() for name in (target, draft))
width = max(map(len, prompts))
ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
options = dict(attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True)
options |= dict(custom_generate=repo, trust_remote_code=True)
runs = [
    target.generate(ids, draft=draft, **options),
    target.generate(ids, assistant_model=draft, **options),
    target.generate(ids, draft=draft, revision=first, **options),
]
answer = [[run.sequences[:, width:].tolist(), sum(s.drafted for s in run.stats)] for run in runs]
failures = []
for wrong in (dict(), dict(draft=draft, trust_remote_code=False)):
    try:
        target.generate(ids, **{**options, **wrong})
    except ValueError as error:
        failures.append(str(error))
print("ANSWER", json.dumps([answer, failures]))
"""

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
target, draft, prompts, repo, new_tokens, first = json.loads(sys.argv[1])
if __name__ == "__main__":
    llm = LLM(
        model=target, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8, async_scheduling=False,
        disable_log_stats=False, seed=0, per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "draft_model", "model": draft, "num_speculative_tokens": 8,
            "draft_sample_method": "probabilistic",
        },
        additional_config={"accept_head": {"policy": f"head:{repo}"}},
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    print("ANSWER", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory, embedded_pair_folder, run_cli):
    """(environment of a client with an empty cache, the first commit, the server). Two commits: the newer has another
    threshold."""
    folder = tmp_path_factory.mktemp("clients")
    with HubServer() as hub:
        client = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # the loopback Hub stores large files by git's protocol
            "HF_HOME": str(folder / "home"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "HF_TOKEN": "hf_writer",
        }
        head = embedded_pair_folder / "heads" / "sampled"
        done = run_cli("publish", head, REPO, env=client)
        assert done.returncode == 0, done.stderr
        first = hub.repositories[REPO].branches["main"]
        changed = folder / "head"
        changed.mkdir()
        for path in head.iterdir():
            (changed / path.name).write_bytes(path.read_bytes())
        decoding = json.loads((head / "decoding.json").read_text())
        (changed / "decoding.json").write_text(json.dumps({**decoding, "threshold": 0.2, "k_max": 4}))
        done = run_cli("publish", changed, REPO, env=client)
        assert done.returncode == 0, done.stderr
        yield {**client, "HF_HOME": str(folder / "fresh"), "HF_TOKEN": ""}, first, hub


@pytest.fixture(scope="module")
def case(embedded_pair, embedded_pair_folder, published):
    """Arguments of the scripts above, and what the target says."""
    import torch

    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    prompts = [embedded_pair.tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    said = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = embedded_pair.target.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
        said.append(output[0, len(prompt) :].tolist())
    folders = [str(embedded_pair_folder / role) for role in ("target", "draft")]
    return [*folders, prompts, REPO, NEW_TOKENS, published[1]], said


def answer_of(python, script, arguments, client):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **client}
    command = [str(python), "-c", script, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    found = re.search(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, (done.stdout + done.stderr)[-6000:]
    return json.loads(found[1]), done.stderr + done.stdout


def cut(rows, said):
    """transformers pads what ended earlier."""
    return [row[: len(mine)] for row, mine in zip(rows, said, strict=True)]


def test_our_own_loop(published, case, embedded_pair_folder, run_cli, tmp_path):
    client, first, _ = published
    arguments, said = case
    rounds = {}
    for name in (REPO, f"{REPO}@{first}"):
        out = tmp_path / f"{len(rounds)}.jsonl"
        done = run_cli(
            *("generate", "--target", arguments[0], "--draft", arguments[1], "--policy", f"head:{name}"),
            *("--prompts", embedded_pair_folder / "prompts" / "test.jsonl", "--max_prompts", PROMPTS),
            *("--max_new_tokens", NEW_TOKENS, "--temperature", 0, "--batch_size", 4, "--out", out),
            env=client,
        )
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record["token_ids"] for record in records] == said
        rounds[name] = sum(record["drafted"] for record in records)
        assert f"{name} was trained or tuned for temperature 1" in done.stderr and "greedy decoding" in done.stderr
    assert rounds[REPO] < rounds[f"{REPO}@{first}"], "the newer revision has a lower threshold"


def test_transformers(published, case):
    client, *_ = published
    arguments, said = case
    (runs, failures), _ = answer_of(sys.executable, TRANSFORMERS, arguments, client)
    for rows, drafted in runs:
        assert cut(rows, said) == said and drafted > 0
    (_, newer), (_, same), (_, older) = runs
    assert newer == same < older, "the head is of the revision that its code is of"
    assert (
        "no draft model" in failures[0] and "loaded from draft" in failures[0]
    )  # a path is published by its last part
    assert "trust_remote_code" in failures[1]


def test_traces_of_models_from_the_hub_record_their_revisions(published, embedded_pair_folder, run_cli, tmp_path):
    """… and so a card of a head that was trained on them has base models."""
    client, _, hub = published
    commits = {}
    for role in ("target", "draft"):
        folder = embedded_pair_folder / role
        commits[role] = hub.add(f"user/{role}", {path.name: path.read_bytes() for path in folder.iterdir()})
    models = ("--target", "user/target", "--draft", "user/draft")
    prompts = ("--prompts", embedded_pair_folder / "prompts" / "dev.jsonl", "--max_prompts", 20, "--max_new_tokens", 8)
    done = run_cli("collect", *models, *prompts, "--out", tmp_path / "traces", env=client)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((tmp_path / "traces" / "trace_config.json").read_text())
    assert (recorded["target_revision"], recorded["draft_revision"]) == (commits["target"], commits["draft"])
    assert recorded["dtype"] == "float32" and "dataset" not in recorded
    fitted = ("--traces", tmp_path / "traces", "--draft", "user/draft", "--epochs", 1, "--out", tmp_path / "head")
    done = run_cli("train", *fitted, env=client)
    assert done.returncode == 0, done.stderr
    done = run_cli("publish", tmp_path / "head", "user/trained", env={**client, "HF_TOKEN": "hf_writer"})
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["user/trained"]
    card = repository.commits[repository.branches["main"]]["README.md"].decode()
    assert ModelCard(card).data.base_model == ["user/target", "user/draft"]
    assert f"`user/draft` at `{commits['draft']}`" in card


def test_vllm(published, case, repository):
    client, _, hub = published
    python = Path(repository) / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM is not installed here; `make vllm-env` makes an environment that has it")
    client = {**client, "HF_HOME": client["HF_HOME"] + "-vllm", "VLLM_NO_USAGE_STATS": "1"}
    client |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    arguments, said = case
    before = len(hub.requests)
    rows, printed = answer_of(python, VLLM, arguments, client)
    assert rows == said
    assert f"policy head:{REPO}" in printed
    assert any("resolve" in path and path.endswith("config.json") for _, path in hub.requests[before:])
