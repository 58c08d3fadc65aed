"""A policy's SPEC: the policy that each form builds, and one sentence that names the error in a wrong one."""

from __future__ import annotations

import json

import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.cli import main
from accept_head.inference import make_policy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.registry import POLICIES, for_any_load
from accept_head.pair import hidden_size
from tests.inference.support.toy import TOKENS, llama, pair_of, random_head

DRAFT = llama(1)
HIDDEN = hidden_size(DRAFT)


@pytest.fixture
def heads(tmp_path):
    """Saves heads: heads(name, decoding=…, **config) → folder."""

    def save(name="head", *, decoding=None, hidden=HIDDEN, **config):
        folder = tmp_path / name
        torch.manual_seed(0)
        AcceptanceHead(HeadConfig(hidden_size=hidden, depth=1, **config)).save_pretrained(folder)
        if decoding is not None:
            text = decoding if isinstance(decoding, str) else json.dumps(decoding)
            (folder / "decoding.json").write_text(text)
        return folder

    return save


def settings(policy):
    """What a HeadPolicy, ConfidencePolicy or EntropyPolicy was told."""
    lag = (policy.lag,) if isinstance(policy, HeadPolicy) else ()
    return (policy.threshold, policy.k_min, policy.max_draft_tokens, *lag)


# --- what is built --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "k"), [("none", 0), ("fixed:0", 0), ("fixed:4", 4), ("fixed:32", 32)])
def test_none_and_fixed_draft_k_tokens(spec, k):
    policy = make_policy(spec, DRAFT)
    assert isinstance(policy, FixedPolicy) and policy.max_draft_tokens == k


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("confidence", (0.4, 1, 20)),
        ("confidence:0.3", (0.3, 1, 20)),
        ("confidence:0.3,k_max=5", (0.3, 1, 5)),
        ("confidence,k_max=5,k_min=2", (0.4, 2, 5)),
        ("confidence:1e-1", (0.1, 1, 20)),
        ("confidence:0", (0.0, 1, 20)),
        ("confidence:1", (1.0, 1, 20)),
    ],
)
def test_confidence_takes_a_threshold_and_bounds(spec, expected):
    policy = make_policy(spec, DRAFT)
    assert type(policy) is ConfidencePolicy and settings(policy) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("entropy", (0.6, 1, 20)),
        ("entropy:1.5", (1.5, 1, 20)),
        ("entropy:0.3,k_max=5", (0.3, 1, 5)),
        ("entropy,k_max=5,k_min=2", (0.6, 2, 5)),
        ("entropy:0", (0.0, 1, 20)),
        ("entropy:12", (12.0, 1, 20)),
    ],
)
def test_entropy_takes_nats_and_bounds(spec, expected):
    policy = make_policy(spec, DRAFT)
    assert type(policy) is EntropyPolicy and settings(policy) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (":0.5", (0.5, 1, 20, 1)),
        (":0.5,lag=0,k_min=2", (0.5, 2, 20, 0)),
        (":0.25,lag=1", (0.25, 1, 20, 1)),
        (":1,k_max=3,k_min=3", (1.0, 3, 3, 1)),
    ],
)
def test_head_takes_a_folder_a_threshold_and_options(heads, options, expected):
    folder = heads()
    policy = make_policy(f"head:{folder}{options}", DRAFT)
    assert type(policy) is HeadPolicy and settings(policy) == expected
    stored = AcceptanceHead.from_pretrained(folder).state_dict()
    assert all(torch.equal(weight, stored[name]) for name, weight in policy.head.state_dict().items())


def test_a_head_that_reads_before_has_no_lag_unless_told_0(heads):
    folder = heads(reads="before")
    assert make_policy(f"head:{folder}:0.5", DRAFT).lag == 0
    assert make_policy(f"head:{folder}:0.5,lag=0", DRAFT).lag == 0


def test_a_head_that_looks_ahead_does_so_unless_the_spec_says_otherwise(tmp_path):
    random_head(16, predicts="both").save_pretrained(tmp_path)
    rules = {
        option: make_policy(f"head:{tmp_path}:0.5{option}", DRAFT) for option in ("", ",rule=gain", ",rule=product")
    }
    assert [policy.predicts_next for policy in rules.values()] == [True, True, False]
    with pytest.raises(InputError, match="rule is 'sum', expected product or gain"):
        make_policy(f"head:{tmp_path}:0.5,rule=sum", DRAFT)


@pytest.mark.parametrize(
    ("decoding", "options", "expected"),
    [
        ({"threshold": 0.7, "k_min": 2, "k_max": 6, "lag": 0}, "", (0.7, 2, 6, 0)),
        ({"threshold": 0.7}, "", (0.7, 1, 20, 1)),
        ({"threshold": 0, "lag": None}, "", (0, 1, 20, 1)),
        ({"threshold": 0.7, "measured": {"speedup": 2}}, "", (0.7, 1, 20, 1)),
        ({"threshold": 0.7, "k_min": 2, "k_max": 6, "lag": 0}, ",k_max=4,lag=1", (0.7, 2, 4, 1)),
        ({"threshold": 0.7, "k_min": 2, "k_max": 6, "lag": 0}, ":0.5", (0.5, 1, 20, 1)),
        ({"threshold": 0.7, "k_min": 2, "k_max": 6, "lag": 0}, ":0.5,k_max=9", (0.5, 1, 9, 1)),
    ],
)
def test_a_head_without_a_threshold_takes_what_was_tuned(heads, decoding, options, expected):
    """A SPEC's own options win; with a threshold of its own nothing is taken from the file."""
    assert settings(make_policy(f"head:{heads(decoding=decoding)}{options}", DRAFT)) == expected


@pytest.mark.parametrize(
    "name", ["v1.2/head.0.5", "C:\\heads\\mine", "run:2/head", "a b/ü", "head=2", "0.5", "k_max=3", "deep/er/still/x"]
)
def test_any_path_can_name_a_head(heads, name):
    folder = heads(name, decoding={"threshold": 0.75})
    assert settings(make_policy(f"head:{folder}:0.5", DRAFT)) == (0.5, 1, 20, 1)
    assert settings(make_policy(f"head:{folder},k_max=7", DRAFT)) == (0.75, 1, 7, 1)


def test_a_relative_windows_path_keeps_its_drive(heads, tmp_path, monkeypatch):
    heads("C:\\heads\\mine", decoding={"threshold": 0.75})
    monkeypatch.chdir(tmp_path)
    assert make_policy("head:C:\\heads\\mine", DRAFT).threshold == 0.75
    assert make_policy("head:C:\\heads\\mine:0.5,lag=0", DRAFT).threshold == 0.5


def test_a_pair_stands_for_its_draft(heads):
    pair = pair_of(llama(0, TOKENS, layers=2), DRAFT)
    assert settings(make_policy(f"head:{heads()}:0.5", pair)) == (0.5, 1, 20, 1)


# --- what is refused ------------------------------------------------------------------------------------------------

WRONG = {
    "": ["unknown", "none", "fixed:K", "confidence", "head:PATH"],
    "best": ["'best'", "unknown", "fixed:K"],
    "Fixed:4": ["'Fixed:4'", "unknown"],
    " fixed:4": ["' fixed:4'", "unknown"],
    "heads:x:0.5": ["unknown"],
    "none:3": ["none:3", "expected none"],
    "none,k=3": ["'k'", "unknown option"],
    "fixed": ["'fixed'", "expected fixed:K"],
    "fixed:": ["'fixed:'", "expected fixed:K"],
    "fixed:x": ["fixed:x", "expected fixed:K"],
    "fixed:-1": ["fixed:-1"],
    "fixed:2.5": ["fixed:2.5", "expected fixed:K"],
    "fixed:²": ["fixed:²", "expected fixed:K"],
    "fixed:4:5": ["fixed:4:5", "expected fixed:K"],
    "fixed:4,k_max=3": ["unknown option", "'k_max'"],
    "fixed:4,": ["unknown option", "''"],
    "confidence:2": ["threshold", "2.0"],
    "confidence:-0.1": ["threshold", "-0.1"],
    "confidence:nan": ["threshold", "nan"],
    "confidence:abc": ["confidence:abc", "expected confidence[:THRESHOLD]"],
    "confidence:0.3,k_max=x": ["k_max", "'x'", "integer"],
    "confidence:0.3,k_max=2.5": ["k_max", "'2.5'", "integer"],
    "confidence:0.3,k_max": ["k_max", "integer"],
    "confidence:0.3,k_max=-1": ["k_max", "'-1'"],
    "confidence:0.3,k_max=0": ["k_max 0"],
    "confidence:0.3,k_min=0": ["k_min 0"],
    "confidence:0.3,k_min=5,k_max=4": ["k_min 5", "k_max 4"],
    "confidence:0.3,k_min=21": ["k_min 21", "k_max 20"],
    "confidence:0.3,lag=0": ["unknown option", "'lag'", "k_max", "k_min"],
    "confidence:0.3,threshold=1": ["unknown option", "'threshold'"],
    "entropy:-0.1": ["threshold", "-0.1", "nats"],
    "entropy:nan": ["threshold", "nan"],
    "entropy:inf": ["threshold", "inf"],
    "entropy:abc": ["entropy:abc", "expected entropy[:NATS]"],
    "entropy:0.3,k_max=0": ["k_max 0"],
    "entropy:0.3,k_min=5,k_max=4": ["k_min 5", "k_max 4"],
    "entropy:0.3,lag=0": ["unknown option", "'lag'"],
    "head": ["'head'", "expected head:PATH[:THRESHOLD]"],
    "head:": ["'head:'", "expected head:PATH[:THRESHOLD]"],
    "head:0.5": ["0.5", "no such folder"],
    "head:PATH": ["PATH", "decoding.json", "threshold"],
    "head:PATH:": ["PATH"],
    "head:PATH:high": ["PATH:high"],
    "head:PATH:1.5": ["threshold", "1.5"],
    "head:PATH:-1": ["threshold", "-1"],
    "head:PATH:nan": ["threshold", "nan"],
    "head:PATH:0.5,lag=2": ["lag", "2"],
    "head:PATH:0.5,lag=no": ["lag", "'no'", "integer"],
    "head:PATH:0.5,lag=": ["lag", "''", "integer"],
    "head:PATH:0.5,k_min=4,k_max=3": ["k_min 4", "k_max 3"],
    "head:PATH:0.5,head=1": ["unknown option", "'head'"],
    "head:PATH:0.5,colour=1": ["unknown option", "'colour'", "k_max", "k_min", "lag"],
    "head:PATH:0.5;lag=0": ["PATH"],
    "head:PATH/nowhere:0.5": ["PATH/nowhere"],
    "head:PATH/config.json:0.5": ["PATH/config.json"],
}


@pytest.mark.parametrize(
    "spec",
    ["cumulative-confidence:0.7", "max-prob:0.5,k_max=6", "adaedl:0.4", "hf-heuristic", "online-logistic:0.3",
     "online-signals:0.6"],
)  # fmt: skip
def test_what_was_tuned_for_one_request_learns_costs_for_any_load(spec):
    assert for_any_load(spec) == f"{spec},costs=auto"
    make_policy(for_any_load(spec), DRAFT)


@pytest.mark.parametrize("spec", ["none", "fixed:3", "leviathan:0.2", "goodput", "max-prob:0.5,costs=0.2"])
def test_what_takes_no_costs_or_has_them_stays_as_it_is(spec):
    assert for_any_load(spec) == spec
    make_policy(spec, DRAFT)


def refusal(spec, draft=DRAFT):
    with pytest.raises(InputError) as caught:
        make_policy(spec, draft)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("spec", WRONG)
def test_a_wrong_spec_is_refused_and_the_part_is_named(heads, spec):
    folder = str(heads())
    message = refusal(spec.replace("PATH", folder) if spec.startswith("head:") else spec)
    for words in WRONG[spec]:
        assert words in message or words.replace("PATH", folder) in message


# content of decoding.json → what the sentence names
WRONG_DECODING = {
    "": ["decoding.json"],
    "{": ["decoding.json", "JSON"],
    "[0.5]": ["decoding.json", "list"],
    "0.5": ["decoding.json", "float"],
    "{}": ["decoding.json", "'threshold'"],
    '{"threshold": null}': ["decoding.json", "'threshold'", "None"],
    '{"threshold": "0.5"}': ["decoding.json", "'threshold'", "'0.5'"],
    '{"threshold": true}': ["decoding.json", "'threshold'", "True"],
    '{"threshold": [0.5]}': ["decoding.json", "'threshold'"],
    '{"threshold": 1.5}': ["threshold", "1.5"],
    '{"threshold": -0.5}': ["threshold", "-0.5"],
    '{"threshold": NaN}': ["decoding.json", "NaN"],
    '{"threshold": 0.5, "k_max": "6"}': ["decoding.json", "'k_max'", "'6'"],
    '{"threshold": 0.5, "k_max": 6.5}': ["decoding.json", "'k_max'", "6.5"],
    '{"threshold": 0.5, "k_min": true}': ["decoding.json", "'k_min'", "True"],
    '{"threshold": 0.5, "k_min": []}': ["decoding.json", "'k_min'", "[]"],
    '{"threshold": 0.5, "k_min": 6, "k_max": 5}': ["k_min 6", "k_max 5"],
    '{"threshold": 0.5, "k_max": 0}': ["k_max 0"],
    '{"threshold": 0.5, "lag": "0"}': ["decoding.json", "'lag'", "'0'"],
    '{"threshold": 0.5, "lag": 2}': ["lag", "2"],
}


@pytest.mark.parametrize("text", WRONG_DECODING)
def test_a_wrong_decoding_json_is_refused_and_the_field_is_named(heads, text):
    message = refusal(f"head:{heads(decoding=text)}")
    for words in WRONG_DECODING[text]:
        assert words in message


def test_an_option_of_the_spec_is_checked_against_the_tuned_ones(heads):
    folder = heads(decoding={"threshold": 0.5, "k_min": 4})
    assert "k_min 4" in (message := refusal(f"head:{folder},k_max=3")) and "k_max 3" in message


@pytest.mark.parametrize("lag", ["1", "2"])
def test_a_lag_is_refused_for_a_head_that_reads_before(heads, lag):
    folder = heads(reads="before", decoding={"threshold": 0.5, "lag": int(lag)})
    for spec in (f"head:{folder}:0.5,lag={lag}", f"head:{folder}"):
        assert f"lag is {lag}" in (message := refusal(spec)) and "before" in message


def test_a_head_of_another_hidden_size_is_refused_with_both_sizes(heads):
    folder = heads(hidden=HIDDEN + 8)
    message = refusal(f"head:{folder}:0.5")
    assert all(words in message for words in (str(folder), str(HIDDEN), str(HIDDEN + 8)))


def test_a_head_that_does_not_judge_tokens_is_refused(heads):
    assert "'next'" in refusal(f"head:{heads(predicts='next')}:0.5")


def test_a_folder_that_is_no_head_is_refused(tmp_path):
    assert str(tmp_path) in refusal(f"head:{tmp_path}:0.5")


# --- the list -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--list-policies"], ["generate", "--list-policies"]])
def test_the_list_names_every_policy(arguments, capsys):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, entry in POLICIES.items():
        assert entry.form.startswith(name) and any(line.split()[:1] == [entry.form] for line in lines)


def test_the_console_command_lists_them_too(run_warm):
    done = run_warm("generate", "--list-policies")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"  {name}" in done.stdout for name in ("none", "fixed:K", "confidence", "entropy", "head:PATH"))


@pytest.mark.parametrize("spec", ["none", "fixed:4", "confidence:0.4", "entropy:0.6", "head:PATH:0.5"])
def test_each_listed_form_can_be_built(heads, spec):
    policy = make_policy(spec.replace("PATH", str(heads())), DRAFT)
    assert policy.max_draft_tokens >= 0
    assert spec.split(":")[0] in POLICIES
