"""Publishing a head and fetching it again, with a local server that implements the Hub's endpoints.

A client is a fork of one process (tests/integration/hub_client.py) and runs several commands, because forks take time.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load, save

from accept_head.head.network import AcceptanceHead
from accept_head.head.saved import save_head
from accept_head.head_config import HeadConfig
from accept_head.hub.card import CardFacts, model_card
from tests.examples import QUALITY, TRACES
from tests.hub_server import HubServer, card_errors, sha256

DECODING = {
    "threshold": 0.65,
    "k_min": 2,
    "k_max": 7,
    "expected": {"speedup": 1.25, "gain_over_best_fixed": 0.04, "oracle_gap_closed": 0.107},
    "traces": {"prompts": 160, "sampling": TRACES.sampling.to_dict()},
}
ON_HUB = replace(TRACES, target_revision="a" * 40, draft_revision="b" * 40, dtype="float32", dataset="someone/prompts")
LOCAL = {"config.json", "decoding.json", "metrics.json", "model.safetensors", "trace_config.json"}
LOCAL |= {"training_config.json"}
MADE = {".gitattributes", "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
# Commands, one after the other in one process: [[words, token], …] → [[exit code, stdout, stderr], …].
RUN_ALL = """
import contextlib, io, json, os
import accept_head.cli
answers, call = [], accept_head.cli._call
def load(_, words):  # a verb for these tests: a head's weights, from the Hub
    from accept_head import AcceptanceHead
    print(json.dumps(AcceptanceHead.from_pretrained(words[0]).blocks[0].linear.weight.tolist()))
for words, token in json.loads(arguments[0]):
    os.environ["HF_TOKEN"] = token or ""
    accept_head.cli._call = load if words[0] == "load" else call
    words[0] = words[0].replace("load", "demo")
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = accept_head.cli.main(words)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory, repository):
    """A HubServer with clients: run(snippet, *arguments), run_all(*(words, token))."""
    folder = tmp_path_factory.mktemp("hub")
    numbers = itertools.count()
    with HubServer() as server:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": server.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
        client = subprocess.Popen(
            [sys.executable, str(repository / "tests" / "integration" / "hub_client.py")],
            env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def run(snippet, *arguments, cache="cache", offline=False):
            out, err = (folder / f"{next(numbers)}.{kind}" for kind in ("out", "err"))
            env = {"HF_HUB_CACHE": str(folder / cache), "HF_HUB_OFFLINE": str(int(offline)), "HF_TOKEN": "hf_writer"}
            words = ["-c", snippet, *map(str, arguments)]
            request = {"arguments": words, "env": env, "stdout": str(out), "stderr": str(err)}
            print(json.dumps(request), file=client.stdin, flush=True)
            assert json.loads(client.stdout.readline()) == 0, err.read_text()
            return out.read_text()

        def run_all(*commands, **options):
            commands = [[[*map(str, words)], token] for words, token in commands]
            answers = json.loads(run(RUN_ALL, json.dumps(commands), **options))
            return [subprocess.CompletedProcess("", *answer) for answer in answers]

        server.run, server.run_all = run, run_all
        yield server
        client.stdin.close()
        client.wait(timeout=60)


@pytest.fixture(autouse=True)
def nothing_planned(hub):
    yield
    hub.mend()


def make_head(folder, seed=0, decoding=DECODING, traces=ON_HUB):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = AcceptanceHead(HeadConfig(hidden_size=8, depth=1))
        torch.nn.init.normal_(head.blocks[0].linear.weight)
    save_head(head, folder, metrics={"dev": {"token": QUALITY}}, training={"epochs": 3}, traces=traces)
    if decoding:
        (folder / "decoding.json").write_text(json.dumps(decoding))
    return folder


def publish(folder, repo, *options, token="hf_writer"):
    return ["publish", folder, repo, *options], token


def loaded(hub, *names, **options):
    """A weight of each head, by a stranger."""
    done = hub.run_all(*[(["load", name], None) for name in names], **options)
    assert all(each.returncode == 0 for each in done), [each.stderr for each in done]
    return [json.loads(each.stdout) for each in done]


def weight(folder):
    return AcceptanceHead.from_pretrained(folder).blocks[0].linear.weight.tolist()


def files_of(hub, repo, revision="main"):
    repository = hub.repositories[repo]
    return repository.commits[repository.resolve(revision)]


def refused(done, *words):
    """One line on stderr, exit code 2."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("accept-head: error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


# --- what is published


@pytest.fixture(scope="module")
def published(hub, tmp_path_factory):
    """name → what was said, of heads published in different ways."""
    folder = tmp_path_factory.mktemp("published")
    secret = f"{folder}/secret"
    traces = replace(TRACES, target=f"{secret}/target", draft=f"{secret}/draft", dtype="float32")
    whole, local = make_head(folder / "whole"), make_head(folder / "local", traces=traces)
    (local / "training_config.json").write_text(json.dumps({"traces": [{"folder": f"{secret}/traces"}]}))
    commands = {
        "whole": publish(whole, "user/whole"),
        "card": publish(whole, "user/card", "--datasets", "someone/else", "--license", "apache-2.0"),
        "local": publish(local, "user/local"),
        "branch": publish(whole, "user/branch", "--private", "true", "--revision", "trial", "--message", "a trial"),
        "wrong card": publish(whole, "user/wrong-card", "--license", "[1, 2]"),
    }
    done = dict(zip(commands, hub.run_all(*commands.values()), strict=True))
    assert all(each.returncode == 0 for name, each in done.items() if name != "wrong card"), done
    hub.whole, hub.secret = whole, secret
    return done


def test_one_commit_holds_the_whole_head(hub, published):
    said = published["whole"].stdout
    assert "use it with --policy head:user/whole\n" in said and "base_model" not in said
    assert len(hub.repositories["user/whole"].messages) == 2, "the Hub's own first commit, and one"
    files = files_of(hub, "user/whole")
    assert set(files) == LOCAL | MADE
    for name in LOCAL:
        assert files[name] == (hub.whole / name).read_bytes(), name
    code = files["custom_generate/generate.py"].decode()
    compile(code, "generate.py", "exec")
    assert "'user/whole'" in code


def test_the_card_has_valid_metadata_and_what_was_measured(hub, published):
    text = files_of(hub, "user/card")["README.md"].decode()
    assert ("POST", "/api/validate-yaml") in hub.requests and card_errors(text) == []
    data = ModelCard(text).data
    assert data.library_name == "accept-head" and data.license == "apache-2.0"
    assert data.base_model == ["some/target", "some/draft"]
    assert data.datasets == ["someone/prompts", "someone/else"]
    assert {"speculative-decoding", "acceptance-prediction"} <= set(data.tags)
    measured = {result.metric_type: result.metric_value for result in data.eval_results}
    assert measured["token_auroc"] == QUALITY["auroc"] and measured["token_binary_kl"] == QUALITY["binary_kl"]
    assert measured["speedup"] == 1.25 and measured["oracle_gap_closed"] == 0.107
    for said in ("head:user/card", "custom_generate='user/card'", "vllm serve some/target", "trust_remote_code=True"):
        assert said in text, said


@pytest.mark.parametrize(
    ("depths", "method", "name"), [(None, "draft_model", "draft"), (6, "eagle3", "EAGLE-3 drafter")]
)
def test_a_card_says_how_its_drafter_is_served(depths, method, name):
    facts = CardFacts(config=HeadConfig(hidden_size=8), traces=replace(ON_HUB, depths=depths), repo="user/head")
    card = model_card(facts)
    assert card.data.base_model == ["some/target", "some/draft"]
    assert f"- {name}: `some/draft` at" in card.text
    (line,) = [line for line in card.text.splitlines() if "--speculative-config" in line]
    speculation = json.loads(line.split("'")[1])
    assert (speculation["method"], speculation["model"]) == (method, "some/draft")
    assert speculation["num_speculative_tokens"] == (depths or 8)


def test_a_card_that_the_hub_refuses_is_no_commit(hub, published):
    refused(published["wrong card"], "license")
    assert len(hub.repositories["user/wrong-card"].messages) == 1
    assert card_errors("---\nbase_model: some/target\n---\n") and card_errors("no metadata")


def test_a_pair_of_local_folders_is_no_base_model_and_where_they_lie_stays_private(hub, published):
    assert "names no base_model: target and draft were local folders" in published["local"].stdout
    files = files_of(hub, "user/local")
    assert "\nbase_model:" not in files["README.md"].decode()
    assert not any(hub.secret.encode() in data for data in files.values())
    assert json.loads(files["trace_config.json"])["draft"] == "draft"
    assert json.loads(files["trace_config.json"])["draft_fingerprint"] == TRACES.draft_fingerprint


def test_privacy_branch_and_message_are_what_was_asked_for(hub, published):
    assert "head:user/branch@trial" in published["branch"].stdout
    repository = hub.repositories["user/branch"]
    assert repository.private and repository.messages[-1] == "a trial"
    assert not hub.repositories["user/whole"].private
    assert "model.safetensors" in files_of(hub, "user/branch", "trial")
    assert "model.safetensors" not in files_of(hub, "user/branch")


def test_push_to_hub_takes_along_all_that_is_true_of_the_weights(hub, published):
    code = """
import torch
from accept_head import AcceptanceHead
head = AcceptanceHead.from_pretrained(arguments[0])
head.push_to_hub("user/pushed", commit_message="as it was")
with torch.no_grad():
    head.output.bias += 1
head.push_to_hub("user/pushed", branch="changed")
"""
    hub.run(code, hub.whole)
    whole, same = files_of(hub, "user/whole"), files_of(hub, "user/pushed")
    assert set(whole) == set(same) and "as it was" in hub.repositories["user/pushed"].messages
    assert all(same[name] == whole[name] for name in LOCAL)
    changed = files_of(hub, "user/pushed", "changed")
    assert set(changed) == {"config.json", "model.safetensors", *MADE}, "nothing was measured of these weights"
    assert changed["model.safetensors"] != whole["model.safetensors"]
    assert "model-index" not in changed["README.md"].decode()


# --- fetching


@pytest.fixture(scope="module")
def revisions(hub, tmp_path_factory):
    """[(commit, weight)] of user/twice: the second head has another threshold, and no metrics."""
    folder = tmp_path_factory.mktemp("twice")
    first = make_head(folder / "first", seed=1)
    second = make_head(folder / "second", seed=2, decoding={**DECODING, "threshold": 0.4})
    (second / "metrics.json").unlink()
    for done in hub.run_all(publish(first, "user/twice"), publish(second, "user/twice")):
        assert done.returncode == 0, done.stderr
    _, *commits = hub.repositories["user/twice"].commits
    return list(zip(commits, (weight(first), weight(second)), strict=True))


def test_a_head_is_pulled_by_revision_into_a_fresh_cache_and_reloads_offline(hub, revisions):
    (first, old), (second, new) = revisions
    assert old != new
    names = [f"user/twice@{first}", "user/twice", "user/twice@main"]
    assert loaded(hub, *names, cache="fresh") == [old, new, new], "the old revision is whole"
    before = len(hub.requests)
    assert loaded(hub, *names, f"user/twice@{second}", cache="fresh", offline=True) == [old, new, new, new]
    (done,) = hub.run_all((["load", "user/whole"], None), cache="fresh", offline=True)
    refused(done, "user/whole", "HF_HUB_OFFLINE")
    assert len(hub.requests) == before, "offline means offline"


def test_what_the_last_head_had_and_this_one_has_not_is_deleted(hub, revisions):
    (first, _), (second, _) = revisions
    assert set(files_of(hub, "user/twice", first)) - set(files_of(hub, "user/twice", second)) == {"metrics.json"}


def test_a_spec_names_a_head_on_the_hub(hub, revisions):
    (first, old), (_, new) = revisions
    name = "head:user/twice"
    specs = [name, f"{name}@{first}", f"{name}@{first}:0.3,k_max=5", f"{name}@main,k_max=9"]
    code = """
import json, torch
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policies.spec import DraftShape
policies = [make_policy(spec, DraftShape(8, torch.device("cpu"))) for spec in arguments]
weights = [policy.head.blocks[0].linear.weight.tolist() for policy in policies]
print(json.dumps([[p.threshold, p.k_min, p.max_draft_tokens, w] for p, w in zip(policies, weights)]))
"""
    found = json.loads(hub.run(code, *specs, cache="specs"))
    assert found == [[0.4, 2, 7, new], [0.65, 2, 7, old], [0.3, 1, 5, old], [0.4, 2, 9, new]]


def test_nothing_but_a_heads_files_is_fetched(hub, published):
    planted = {"pytorch_model.bin": b"\x80\x04.", "modeling.py": b"raise SystemExit(9)", "x/config.json": b"{}"}
    hub.add("user/planted", files_of(hub, "user/whole") | planted)
    before = len(hub.requests)
    assert loaded(hub, "user/planted") == [weight(hub.whole)]
    fetched = [path.split("/", 5)[-1] for _, path in hub.requests[before:] if "/resolve/" in path]
    assert set(fetched) == LOCAL


def test_weights_that_are_not_the_heads_are_refused_by_name(hub, published):
    files, name = dict(files_of(hub, "user/whole")), "blocks.0.linear.weight"
    tensors = load(files.pop("model.safetensors"))
    spoilt = {
        f"tensor '{name}' is missing": {key: value for key, value in tensors.items() if key != name},
        "tensor 'blocks.5.linear.weight' does not belong": tensors | {"blocks.5.linear.weight": torch.zeros(2)},
        f"tensor '{name}' has shape (8, 9), expected (8, 8)": tensors | {name: torch.zeros(8, 9)},
        "the repository has no model.safetensors": None,
    }
    for count, wrong in enumerate(spoilt.values()):
        weights = {} if wrong is None else {"model.safetensors": save(wrong)}
        hub.add(f"user/spoilt-{count}", files | weights)
    answers = hub.run_all(*[(["load", f"user/spoilt-{count}"], None) for count in range(len(spoilt))])
    for done, words in zip(answers, spoilt, strict=True):
        refused(done, words)


# --- what goes wrong


def test_an_upload_that_breaks_off_leaves_the_old_revision_and_is_resumed(hub, tmp_path):
    first, second = make_head(tmp_path / "first", seed=3), make_head(tmp_path / "second", seed=4)
    weights = [sha256((folder / "model.safetensors").read_bytes()) for folder in (first, second)]
    hub.drop_next(f"PUT /lfs/{weights[0]}")
    hub.drop_next(f"PUT /lfs/{weights[1]}", times=6)  # as often as huggingface_hub tries
    hub.drop_next("POST /api/models/user/broken/commit/", skip=1)
    commands = [publish(first, "user/broken"), *[publish(second, "user/broken")] * 4]
    broken_once, upload, commit, resumed, unchanged = hub.run_all(*commands)
    assert broken_once.returncode == 0, broken_once.stderr
    refused(upload, "publishing to user/broken: the connection", "run this again")
    refused(commit, "publishing to user/broken: the connection", "what has arrived is not sent twice")
    assert resumed.returncode == unchanged.returncode == 0, (resumed.stderr, unchanged.stderr)
    _, old, new = hub.repositories["user/broken"].commits
    assert old in broken_once.stdout and new in resumed.stdout and new in unchanged.stdout
    assert files_of(hub, "user/broken", old)["model.safetensors"] == (first / "model.safetensors").read_bytes()
    assert files_of(hub, "user/broken")["model.safetensors"] == (second / "model.safetensors").read_bytes()
    assert [Counter(hub.uploaded)[each] for each in weights] == [1, 1]


PUBLISH_FAILURES = {
    "no-token": (None, None, ["401", "hf auth login"]),
    "reader": ("hf_reader", None, ["403"]),
    "forbidden-commit": ("hf_writer", 403, ["403", "allowed"]),
    "too-many": ("hf_writer", 429, ["429", "try again later"]),
    "server-error": ("hf_writer", 500, ["500"]),
    "vanished": ("hf_writer", 404, ["404"]),
}


def test_a_refused_publish_is_one_clear_line(hub, published):
    for name, (_, status, _) in PUBLISH_FAILURES.items():
        if status:
            hub.fail_next(f"user/{name}/(preupload|commit)/main", status, times=99)
    commands = [publish(hub.whole, f"user/{name}", token=token) for name, (token, *_) in PUBLISH_FAILURES.items()]
    for done, (name, (*_, words)) in zip(hub.run_all(*commands), PUBLISH_FAILURES.items(), strict=True):
        refused(done, f"publishing to user/{name}: ", *words)
        assert "model.safetensors" not in (files_of(hub, f"user/{name}") if f"user/{name}" in hub.repositories else {})


PULL_FAILURES = [
    ("user/nowhere", "hf_writer", ["404", "no such repository"]),
    ("user/nowhere", None, ["401", "hf auth login"]),
    ("user/there@nowhere", None, ["no such revision"]),
    ("user/gated", None, ["gated", "hf auth login"]),
    ("user/secret", "hf_reader", ["404", "private"]),
    ("user/forbidden", None, ["403"]),
    ("user/too-many", None, ["429", "try again later"]),
    ("user/there", None, ["no config.json", "not a head"]),
    ("user/a/there", None, ["user/name@revision"]),
]


def test_a_head_that_cannot_be_had_is_one_clear_line(hub):
    for name in ("there", "forbidden", "too-many"):
        hub.add(f"user/{name}", {"README.md": b"---\n---\n"})
    hub.add("user/gated", {"config.json": b"{}"}, gated=True)
    hub.add("user/secret", {"config.json": b"{}"}, private=True)
    hub.fail_next("user/forbidden", 403, times=99)
    hub.fail_next("user/too-many", 429, times=99)
    answers = hub.run_all(*[(["load", name], token) for name, token, _ in PULL_FAILURES], cache="failures")
    for done, (name, _, words) in zip(answers, PULL_FAILURES, strict=True):
        refused(done, name, *words)


def test_no_network_is_one_clear_line(hub, published):
    code = """
from pathlib import Path
from huggingface_hub import constants
from accept_head import InputError
from accept_head.hub.folder import head_folder
from accept_head.hub.publish import push_folder
constants.ENDPOINT = "http://127.0.0.1:9"  # the discard port: nothing listens
for what in (lambda: head_folder("user/name"), lambda: push_folder(Path(arguments[0]), "user/name")):
    try:
        what()
    except InputError as error:
        print(error)
"""
    fetched, sent = hub.run(code, hub.whole, cache="no-network").splitlines()
    assert fetched.startswith("user/name: ") and "the connection to http://127.0.0.1:9 failed" in fetched
    assert sent.startswith("publishing to user/name: ") and "the connection to http://127.0.0.1:9 failed" in sent


def test_a_wrong_command_sends_nothing(hub, published, tmp_path):
    no_weights, no_object = (make_head(tmp_path / name) for name in ("no_weights", "no_object"))
    (no_weights / "model.safetensors").write_bytes(b"")
    (no_object / "metrics.json").write_text("[]")
    wrong = {
        "expected user/name": (hub.whole, "wrong"),
        "no such folder": (tmp_path / "nowhere", "user/wrong"),
        "model.safetensors": (no_weights, "user/wrong"),
        "metrics.json": (no_object, "user/wrong"),
    }
    before = len(hub.requests)
    for done, word in zip(hub.run_all(*[publish(*words) for words in wrong.values()]), wrong, strict=True):
        refused(done, word)
    assert len(hub.requests) == before
