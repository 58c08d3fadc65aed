"""Fixtures for all tests: the embedded pair, a random pair, ways to run the console command, and traces made once."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# No test may reach out. Read by huggingface_hub and datasets when they are first imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


LONGEST = ("test_rehearsal.py", "test_sampled.py")  # one of them inside vLLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file with the longest tests first, so that no process is left alone with it."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def embedded_pair_folder() -> Path:
    """The really trained pair, with `target`, `draft` and `prompts` in it."""
    # ACCEPT_HEAD_TEST_PAIR: test with another pair of the same layout, say while checkpoints/tiny is trained anew.
    folder = Path(os.environ.get("ACCEPT_HEAD_TEST_PAIR") or REPOSITORY / "checkpoints" / "tiny")
    for part in ("target", "draft"):
        if not (folder / part / "model.safetensors").is_file():
            pytest.fail(f"{folder / part} has no model.safetensors; `make pair` trains it")
    return folder


@pytest.fixture(scope="session")
def embedded_pair(embedded_pair_folder: Path) -> Any:
    from accept_head import load_pair

    return load_pair(embedded_pair_folder / "target", embedded_pair_folder / "draft", device="cpu")


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """Makes tokenizers with one token a byte, five special ones and a chat template. order: of the bytes' ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(order: int = 1, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
        tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())[::order]]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=128
        )
        fast.chat_template = chat_template
        return fast

    return make


@pytest.fixture(scope="session")
def random_llama() -> Callable[..., Any]:
    """Makes untrained Llamas: one seed, one model. Its distributions are peaked, as those of a trained one are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(
        seed: int, *, hidden: int = 32, layers: int = 2, vocab: int = 261, attention: str = "sdpa", context: int = 128
    ) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            initializer_range=0.4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation=attention,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def random_pair_folder(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any], random_llama: Callable[..., Any]
) -> Path:
    """A pair of untrained models of 261 tokens, for fast tests of the mechanics: `target`, `draft`, `prompts`."""
    folder = tmp_path_factory.mktemp("random-pair")
    tokenizer = byte_tokenizer()
    for name, model in (("target", random_llama(1)), ("draft", random_llama(2, hidden=16, layers=1))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"id": f"p{i}", "domain": "abc"[i % 3], "prompt": "word " * (1 + i % 4)}) for i in range(24)]
    (folder / "prompts").mkdir()
    (folder / "prompts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def random_pair(random_pair_folder: Path) -> Any:
    from accept_head import load_pair

    return load_pair(random_pair_folder / "target", random_pair_folder / "draft", device="cpu")


@pytest.fixture(scope="session")
def make_traces() -> Callable[..., list[dict[str, Any]]]:
    """Makes trace records of random content: any lengths, about half of the drafts accepted. alternatives: to the drawn
    token of each position; about a third of them a token that was drawn there before."""
    import numpy as np

    def drawn_beside(record: dict[str, Any], count: int, random: np.random.Generator, vocab: int) -> dict[str, Any]:
        columns: tuple[list[Any], ...] = [], [], []
        for drawn in zip(*(record[name] for name in ("draft_ids", "draft_logprob", "acceptance")), strict=True):
            there = [drawn]
            for _ in range(count):
                other = int(random.integers(5, vocab)), -3 * random.random(), random.random()
                again = there[random.integers(len(there))]
                there.append(again if other[0] == again[0] or random.random() < 0.35 else other)
            for column, values in zip(columns, zip(*there[1:], strict=True), strict=True):
                column.extend(values)
        return dict(zip(("alternative_ids", "alternative_logprob", "alternative_acceptance"), columns, strict=True))

    def make(
        lengths: Sequence[tuple[int, int]],
        seed: int = 0,
        vocab: int = 261,
        first_index: int = 0,
        alternatives: int = 0,
    ) -> list[dict[str, Any]]:
        random, others = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        records = []
        for index, (prompt, response) in enumerate(lengths, start=first_index):
            ids, drafts = random.integers(5, vocab, response), random.integers(5, vocab, response)
            accepted = random.random(response) < 0.5
            signals = ("acceptance", "overlap", "draft_max_prob", "draft_entropy")
            records.append(
                {
                    "index": index,
                    "id": f"p{index}",
                    "domain": "",
                    "finished": False,
                    "prompt_ids": random.integers(5, vocab, prompt).tolist(),
                    "response_ids": ids.tolist(),
                    "draft_ids": np.where(accepted, ids, drafts).tolist(),
                    "accepted": accepted.tolist(),
                    "target_logprob": (-random.random(response)).tolist(),
                    "draft_logprob": (-random.random(response)).tolist(),
                    **{name: random.random(response).tolist() for name in signals},
                    "divergence": [0.5] * response,
                }
            )
            if alternatives:
                records[-1] |= drawn_beside(records[-1], alternatives, others, vocab)
        return records

    return make


def _environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """That of this process, on CPUs, one thread, and not as if launched by something that runs the tests."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", **(extra or {})}


@pytest.fixture(scope="session")
def cli_environment() -> dict[str, str]:
    """Environment of the console command, for tests that start it themselves."""
    return _environment()


@pytest.fixture(scope="session")
def console_script() -> str:
    return str(SCRIPTS / "accept-head")


@pytest.fixture(scope="session")
def run_cli(console_script: str) -> Run:
    """Runs the console command in a fresh process: run_cli(*args, env=None) → returncode, stdout, stderr."""

    def run(*arguments: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [console_script, *map(str, arguments)]
        return subprocess.run(command, env=_environment(env), capture_output=True, text=True, timeout=500)

    return run


@pytest.fixture(scope="session")
def run_launched() -> Run:
    """Runs the console command under `accelerate launch` with two CPU processes."""
    launch = [str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_processes", "2", "-m", "accept_head"]

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [*launch, *map(str, arguments)]
        return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=500)

    return run


@pytest.fixture(scope="session")
def run_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """As run_cli, in a fork of a process that has the libraries imported: seconds faster each time."""
    folder = tmp_path_factory.mktemp("warm-cli")
    server = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tests" / "integration" / "warm_cli.py")],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    count = 0

    def run(*arguments: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        nonlocal count
        count += 1
        out, err = folder / f"{count}.out", folder / f"{count}.err"
        words = [str(argument) for argument in arguments]
        request = {"arguments": words, "env": env or {}, "stdout": str(out), "stderr": str(err)}
        print(json.dumps(request), file=server.stdin, flush=True)
        code = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    yield run
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture(scope="session")
def collect(run_warm: Run) -> Callable[..., Path]:
    """Runs `accept-head collect` on a pair folder and returns the folder of traces."""

    def run(pair: Path, out: Path, *, prompts: str = "train", **options: Any) -> Path:
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        models = ("--target", pair / "target", "--draft", pair / "draft")
        done = run_warm("collect", *models, "--prompts", pair / "prompts" / f"{prompts}.jsonl", "--out", out, *flags)
        assert done.returncode == 0, done.stderr
        return out

    return run


@pytest.fixture(scope="session")
def random_traces_folder(
    tmp_path_factory: pytest.TempPathFactory, random_pair_folder: Path, collect: Callable[..., Path]
) -> Path:
    """Traces of the random pair: 24 prompts, 6 shards."""
    out = tmp_path_factory.mktemp("random") / "traces"
    return collect(random_pair_folder, out, max_new_tokens=12, batch_size=4, shard_size=4)


@pytest.fixture(scope="session")
def embedded_traces(
    tmp_path_factory: pytest.TempPathFactory, embedded_pair_folder: Path, collect: Callable[..., Path]
) -> Callable[[str], Path]:
    """embedded_traces("train", "dev" or "test"): of the trained pair on its shipped prompts, at the default sampling
    settings; few of "test".

    The first of the test processes that needs them makes them for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "embedded"
    folder.mkdir(exist_ok=True)
    options: dict[str, dict[str, Any]] = {
        "train": {"max_prompts": 180},
        "dev": {"prompts": "dev", "seed": 1},
        "test": {"prompts": "test", "max_prompts": 16},
    }

    def made(split: str) -> Path:
        out, mark = folder / split, folder / f"{split}-made"
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not mark.exists():
                collect(embedded_pair_folder, out, max_new_tokens=48, batch_size=16, shard_size=32, **options[split])
                mark.touch()
        return out

    return made
