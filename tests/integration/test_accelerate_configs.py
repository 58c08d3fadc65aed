"""configs/accelerate: accelerate reads the files, their options reach the processes, and the CPU config runs."""

from __future__ import annotations

import json
import subprocess

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

SIZES = {"multi_gpu": (1, 8), "multi_node": (2, 16), "cpu": (1, 2)}


@pytest.fixture
def folder(repository):
    return repository / "configs" / "accelerate"


def test_these_are_all(folder):
    assert {path.stem for path in folder.glob("*")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_accelerate_reads_it_as_plain_ddp(folder, name):
    config = load_config_from_file(str(folder / f"{name}.yaml"))  # refuses unknown keys
    assert (config.num_machines, config.num_processes) == SIZES[name]
    expected = DistributedType.MULTI_CPU if name == "cpu" else DistributedType.MULTI_GPU
    assert config.distributed_type == expected and config.use_cpu == (name == "cpu")
    assert not any((config.fsdp_config, config.deepspeed_config, config.megatron_lm_config))
    assert config.mixed_precision == "no"


@pytest.mark.parametrize("name", ["multi_gpu", "multi_node"])
def test_a_launch_with_it_starts_so_many_processes(folder, name):
    """accelerate's own reading of `launch --config_file`, up to where it would start torchrun."""
    words = ["--config_file", str(folder / f"{name}.yaml"), "-m", "accept_head", "train", "--config", "x.yaml"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert defaults is not None and args.multi_gpu
    assert (int(args.num_machines), int(args.num_processes)) == SIZES[name]


def test_a_key_that_accelerate_does_not_know_would_be_seen(folder, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((folder / "cpu.yaml").read_text() + "num_procs: 2\n")
    with pytest.raises(ValueError, match="num_procs"):
        load_config_from_file(str(wrong))


@pytest.mark.slow
def test_two_cpu_processes_write_what_one_writes(
    folder, random_pair_folder, console_script, cli_environment, collect, tmp_path
):
    pair = random_pair_folder
    sizes = {"max_new_tokens": 12, "batch_size": 4, "shard_size": 4}
    one = collect(pair, tmp_path / "one", **sizes)
    launch = [console_script.replace("accept-head", "accelerate"), "launch", "--config_file", str(folder / "cpu.yaml")]
    models = ["--target", pair / "target", "--draft", pair / "draft", "--prompts", pair / "prompts" / "train.jsonl"]
    more = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    command = [*launch, "-m", "accept_head", "collect", *models, "--out", tmp_path / "two", *more]
    done = subprocess.run(list(map(str, command)), env=cli_environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "12/12" in done.stderr and "/24" not in done.stderr, "the first process had all of the work"
    files = [{path.name: path.read_bytes() for path in out.iterdir()} for out in (one, tmp_path / "two")]
    assert files[0] == files[1] and json.loads(files[0]["trace_config.json"])["num_prompts"] == 24
