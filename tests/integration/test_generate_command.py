"""`accept-head generate`: its output, its interruption, and its errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from accept_head.inference.verbs.generate import generate_file
from accept_head.inference.verbs.terminal import Terminal
from tests.runs import besides_progress

NEW_TOKENS = 12
SAMPLED = {"temperature": 1, "top_k": 0}
UNFINISHED = ".out.jsonl.unfinished"


@pytest.fixture(scope="module")
def records(embedded_pair_folder):
    """Six prompts of several domains, the last one a chat message."""
    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text().splitlines()[:5]
    chat = {"id": "chat", "prompt": [{"role": "user", "content": "Name three colours."}]}
    return [*map(json.loads, lines), chat]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def pair_flags(embedded_pair_folder):
    return ["--target", embedded_pair_folder / "target", "--draft", embedded_pair_folder / "draft"]


@pytest.fixture(scope="module")
def command(pair_flags, run_warm, records):
    """Runs the command in a folder: command(folder, records=…, **options) → what was printed, lines, summary."""

    def run(folder, records=records, **options):
        prompts, out = write(folder / "prompts.jsonl", records), folder / "out.jsonl"
        options = {"prompts": prompts, "out": out, "max_new_tokens": NEW_TOKENS, **options}
        done = run_warm("generate", *pair_flags, *(word for name in options for word in (f"--{name}", options[name])))
        assert (done.returncode, besides_progress(done.stderr)) == (0, [])
        assert not (folder / UNFINISHED).exists()
        summary = json.loads((folder / "out.stats.json").read_text())
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, lines=read(out), summary=summary)

    return run


@pytest.fixture(scope="module")
def greedy(command, tmp_path_factory):
    return command(tmp_path_factory.mktemp("greedy"), batch_size=4)


@pytest.fixture(scope="module")
def sampled(command, tmp_path_factory):
    return command(tmp_path_factory.mktemp("sampled"), batch_size=4, **SAMPLED)


def token_ids(done):
    return {line["id"]: line["token_ids"] for line in done.lines}


def prompt_ids(pair, record):
    if isinstance(record["prompt"], str):
        return pair.tokenizer(record["prompt"], return_tensors="pt")["input_ids"]
    messages = record["prompt"]
    return pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def transformers_greedy(pair, records, **options):
    """{id: new tokens} by transformers' own `generate`, one prompt at a time."""
    said = {}
    for record in records:
        ids = prompt_ids(pair, record)
        output = pair.target.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, **options)
        said[record["id"]] = output[0, ids.shape[1] :].tolist()
    return said


# --- what it writes -------------------------------------------------------------------------------------------------


def test_one_object_a_prompt_in_the_order_of_the_prompts(greedy, records, embedded_pair):
    assert [line["id"] for line in greedy.lines] == [record["id"] for record in records]
    assert [line["index"] for line in greedy.lines] == list(range(len(records)))
    for line, record in zip(greedy.lines, records, strict=True):
        assert line["prompt"] == record["prompt"]
        assert line["domain"] == record.get("domain", "")
        assert line["text"] == embedded_pair.tokenizer.decode(line["token_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("fixture", ["greedy", "sampled"])
def test_the_counts_of_a_line_agree(fixture, request):
    for line in request.getfixturevalue(fixture).lines:
        assert line["generated"] == len(line["token_ids"]) <= NEW_TOKENS
        assert 0 <= line["accepted"] <= line["drafted"] <= 4 * line["rounds"]
        assert line["discarded"] == line["drafted"] - line["accepted"]
        assert line["draft_forwards"] == line["drafted"]
        assert line["forwards"] == line["draft_forwards"] + line["rounds"]
        assert line["accepted"] + 1 <= line["generated"] <= line["accepted"] + line["rounds"]
        assert line["seconds"] > 0


def test_greedy_tokens_are_those_of_transformers_chat_messages_included(greedy, records, embedded_pair):
    assert token_ids(greedy) == transformers_greedy(embedded_pair, records)


@pytest.mark.parametrize("fixture", ["greedy", "sampled"])
def test_the_summary_follows_from_the_lines(fixture, request):
    done = request.getfixturevalue(fixture)
    total = {name: sum(line[name] for line in done.lines) for name in ("generated", "drafted", "accepted", "rounds")}
    summary = done.summary
    assert summary["responses"] == len(done.lines)
    assert {name: summary[name] for name in ("generated", "drafted", "accepted")} == {
        name: total[name] for name in ("generated", "drafted", "accepted")
    }
    assert summary["discard_rate"] == pytest.approx((total["drafted"] - total["accepted"]) / total["generated"])
    assert summary["verification_rate"] == pytest.approx(total["rounds"] / total["generated"])
    assert summary["block_efficiency"] == pytest.approx(total["generated"] / total["rounds"])
    assert summary["seconds"] > 0 and summary["policy"] == "fixed:4"


def test_the_summary_says_how_it_was_sampled(sampled):
    assert sampled.summary["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert (sampled.summary["seed"], sampled.summary["max_new_tokens"]) == (0, NEW_TOKENS)


def test_rates_and_the_memory_plan_are_printed_and_nothing_more(greedy):
    memory, rates, wrote = greedy.stdout.splitlines()
    assert memory == greedy.summary["memory"] and "4 rows" in memory
    assert f"{greedy.summary['discard_rate']:.3f}" in rates and f"{greedy.summary['verification_rate']:.3f}" in rates
    assert wrote.startswith("wrote ") and wrote.endswith("out.jsonl")


def test_another_field_and_fewer_prompts(command, tmp_path, greedy, records):
    renamed = [{"id": record["id"], "question": record["prompt"]} for record in records]
    done = command(tmp_path, renamed, field="question", max_prompts=2, policy="none")
    assert list(token_ids(done).items()) == list(token_ids(greedy).items())[:2]
    assert (done.summary["drafted"], done.summary["verification_rate"]) == (0, 1)


# --- random numbers belong to prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sampled_response_does_not_depend_on_the_batch_size(command, tmp_path, sampled, batch_size):
    assert token_ids(command(tmp_path, batch_size=batch_size, **SAMPLED)) == token_ids(sampled)


def test_a_sampled_response_does_not_depend_on_the_order_of_the_prompts(command, tmp_path, sampled, records):
    shuffled = [records[index] for index in (4, 1, 5, 0, 3, 2)]
    done = command(tmp_path, shuffled, batch_size=4, **SAMPLED)
    assert [line["id"] for line in done.lines] == [record["id"] for record in shuffled]
    assert token_ids(done) == token_ids(sampled)


def test_another_seed_gives_other_responses(command, tmp_path, sampled, greedy):
    other = token_ids(command(tmp_path, batch_size=4, seed=1, **SAMPLED))
    assert all(other[name] != token_ids(sampled)[name] != token_ids(greedy)[name] for name in other)


# --- settings -------------------------------------------------------------------------------------------------------


def test_repetition_penalty_is_transformers(command, tmp_path, greedy, records, embedded_pair):
    done = command(tmp_path, repetition_penalty=1.4)
    assert token_ids(done) == transformers_greedy(embedded_pair, records, repetition_penalty=1.4) != token_ids(greedy)


def test_stop_strings_are_transformers(command, tmp_path, greedy, records, embedded_pair):
    """Strings with a space, a line break, and one that starts in the middle of a token."""
    stop = [greedy.lines[0]["text"][5:9], "\n", greedy.lines[2]["text"][4:9]]
    done = command(tmp_path, stop=json.dumps(stop))
    expected = transformers_greedy(embedded_pair, records, stop_strings=stop, tokenizer=embedded_pair.tokenizer)
    assert token_ids(done) == expected != token_ids(greedy)
    assert done.summary["stop"] == stop
    assert any(stop[0] in line["text"] for line in done.lines)


@pytest.mark.parametrize("option", [{"min_p": 1}, {"top_k": 1}, {"top_p": 1e-6}])
def test_a_filter_that_leaves_one_token_makes_sampling_greedy(command, tmp_path, greedy, sampled, option):
    assert token_ids(command(tmp_path, **{**SAMPLED, **option})) == token_ids(greedy) != token_ids(sampled)


@torch.no_grad()
def test_min_p_drops_what_it_says(command, tmp_path, sampled, records, embedded_pair):
    done = command(tmp_path, min_p=0.2, **SAMPLED)

    def least_share(lines):
        """Of the drawn tokens' probability, relative to the most likely token's."""
        shares = []
        for line, record in zip(lines, records, strict=True):
            prompt = prompt_ids(embedded_pair, record)
            ids = torch.cat([prompt, torch.tensor([line["token_ids"]])], dim=1)
            p = embedded_pair.target(ids).logits[0, prompt.shape[1] - 1 : -1].softmax(-1)
            drawn = p.gather(1, torch.tensor(line["token_ids"])[:, None])[:, 0]
            shares.append(float((drawn / p.max(-1).values).min()))
        return min(shares)

    assert least_share(done.lines) >= 0.2 - 1e-4
    assert least_share(sampled.lines) < 0.1


# --- interrupted runs -----------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.fixture
def arguments(tmp_path, embedded_pair_folder, records):
    """Of generate_file, for the run that `sampled` is the result of."""
    return {
        "target": str(embedded_pair_folder / "target"),
        "draft": str(embedded_pair_folder / "draft"),
        "prompts": str(write(tmp_path / "prompts.jsonl", records)),
        "out": str(tmp_path / "out.jsonl"),
        "batch_size": 2,
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "top_k": 0,
    }


def interrupt(monkeypatch, arguments, after, how):
    """Run until `after` responses are finished; returns the hidden file."""

    def finished(terminal, done, count=[]):  # noqa: B006
        count.append(done)
        if len(count) == after:
            how()

    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "finished", finished)
        generate_file(**arguments)


def raise_interrupted():
    raise Interrupted


@pytest.fixture
def interrupted(monkeypatch, arguments, tmp_path):
    """The hidden file of a run that was interrupted after three responses."""
    with pytest.raises(Interrupted):
        interrupt(monkeypatch, arguments, 3, raise_interrupted)
    hidden = tmp_path / UNFINISHED
    assert not (tmp_path / "out.jsonl").exists()
    return hidden


def kept_in(hidden):
    return {line["id"]: line for line in read(hidden)[1:]}


def without_seconds(line):
    return {name: value for name, value in line.items() if name != "seconds"}


def test_an_interrupted_run_goes_on_where_it_was(interrupted, command, tmp_path, sampled):
    kept = kept_in(interrupted)
    assert len(kept) == 3
    done = command(tmp_path, batch_size=4, **SAMPLED)
    assert "going on: 3 of 6 responses are there" in done.stdout
    assert [without_seconds(line) for line in done.lines] == [without_seconds(line) for line in sampled.lines]
    assert {line["id"]: line for line in done.lines if line["id"] in kept} == kept  # to the last digit of `seconds`
    rates = ("responses", "generated", "drafted", "accepted", "discard_rate", "verification_rate", "block_efficiency")
    assert all(done.summary[name] == sampled.summary[name] for name in rates)


def test_a_half_written_last_line_is_decoded_again(interrupted, command, tmp_path, sampled):
    text = interrupted.read_text()
    interrupted.write_text(text[: text.rindex('"token_ids"') + 20])
    done = command(tmp_path, **SAMPLED)
    assert "going on: 2 of 6 responses are there" in done.stdout
    assert token_ids(done) == token_ids(sampled)


def test_a_run_can_be_interrupted_twice(interrupted, monkeypatch, arguments, command, tmp_path, sampled):
    interrupted.write_text(interrupted.read_text() + '{"index": 4, "id"')
    first = kept_in_whole_lines(interrupted)
    with pytest.raises(Interrupted):
        interrupt(monkeypatch, arguments, 2, raise_interrupted)
    second = kept_in(interrupted)
    assert first.items() < second.items() and len(second) == 5
    done = command(tmp_path, **SAMPLED)
    assert "going on: 5 of 6" in done.stdout
    assert token_ids(done) == token_ids(sampled)


def kept_in_whole_lines(hidden):
    lines = [json.loads(line) for line in hidden.read_text().split("\n")[1:-1]]
    return {line["id"]: line for line in lines}


def test_a_killed_run_goes_on_where_it_was(monkeypatch, arguments, command, tmp_path, sampled):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=interrupt, args=(monkeypatch, arguments, 4, die))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(kept_in(tmp_path / UNFINISHED)) == 4
    done = command(tmp_path, **SAMPLED)
    assert "going on: 4 of 6" in done.stdout
    assert token_ids(done) == token_ids(sampled)


OTHER_SETTINGS = {
    "seed": {"seed": 3},
    "min_p": {"min_p": 0.1},
    "policy": {"policy": "fixed:2"},
    "stop": {"stop": '["\\n"]'},
    "dtype": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_responses_of_other_settings_are_not_used(interrupted, command, tmp_path, name):
    kept = kept_in(interrupted)
    done = command(tmp_path, **{**SAMPLED, **OTHER_SETTINGS[name]})
    assert "going on" not in done.stdout
    lines = {line["id"]: line for line in done.lines}
    assert all(line["seconds"] != lines[name]["seconds"] for name, line in kept.items())


def test_responses_of_other_prompts_are_not_used(interrupted, command, tmp_path, records):
    done = command(tmp_path, records[::-1], **SAMPLED)
    assert "going on" not in done.stdout
    assert [line["id"] for line in done.lines] == [record["id"] for record in records[::-1]]


@pytest.mark.parametrize("content", ["", "not ours\n", '{"settings": "another"}\n{"index": 0}\n', "\n\n"])
def test_a_hidden_file_of_another_kind_is_not_used(command, tmp_path, sampled, content):
    (tmp_path / UNFINISHED).write_text(content)
    done = command(tmp_path, **SAMPLED)
    assert "going on" not in done.stdout
    assert token_ids(done) == token_ids(sampled)


# --- the terminal ---------------------------------------------------------------------------------------------------


def test_one_row_at_a_time_streams_its_text(command, tmp_path, greedy):
    done = command(tmp_path, batch_size=1, stream="true")
    place = 0
    for line in greedy.lines:
        place = done.stdout.index(f"{line['text']}\n[", place)
        place = done.stdout.index("tokens/s", place)
    assert token_ids(done) == token_ids(greedy)


def test_the_stream_ends_where_a_stop_string_ends_the_text(command, tmp_path, greedy):
    stop = [line["text"][7:10] for line in greedy.lines]
    done = command(tmp_path, batch_size=1, stream="true", stop=json.dumps(stop))
    assert token_ids(done) != token_ids(greedy)
    for line in done.lines:
        assert f"\n{line['text']}\n[" in done.stdout


def test_several_rows_show_progress_instead(command, tmp_path, greedy):
    done = command(tmp_path, batch_size=2, stream="true")
    assert f"{len(greedy.lines)}/{len(greedy.lines)}" in done.stderr and "tokens/s" in done.stderr
    assert all(line["text"] not in done.stdout for line in greedy.lines)


def test_no_progress_is_shown_when_it_is_not_wanted(command, tmp_path):
    assert command(tmp_path, batch_size=2, stream="false").stderr == ""


def test_nothing_is_streamed_where_nobody_reads(command, tmp_path, greedy):
    done = command(tmp_path, batch_size=1)
    assert len(done.stdout.splitlines()) == 3
    assert all(line["text"] not in done.stdout for line in greedy.lines)


TEXTS = ["plain", "two\n\n  lines\n", "[bold]tags[/bold]", "漢字 é", "long " * 60, "code :smile: here", "a\ttab"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_prints_the_text_as_it_is(capsys, byte_tokenizer, text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    terminal = Terminal(tokenizer, 1, one_row=True, wanted=True)
    for count in [*range(0, len(ids), 40), len(ids)]:
        terminal._show([(ids[:count], "green")])
    assert capsys.readouterr().out == text


# --- what it refuses ------------------------------------------------------------------------------------------------

REFUSED = {
    "a missing prompts file": (lambda f: {"prompts": f / "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "no prompts": (lambda f: {"prompts": write(f / "empty.jsonl", [])}, ["empty.jsonl"]),
    "a prompt longer than the context": (
        lambda f: {"prompts": write(f / "long.jsonl", [{"prompt": "a"}, {"prompt": "word " * 600}])},
        ["long.jsonl", "line 2", str(512 - NEW_TOKENS)],
    ),
    "a response longer than the context": (lambda f: {"max_new_tokens": 512}, ["max_new_tokens", "prompts.jsonl"]),
    "a field that no record has": (lambda f: {"field": "text"}, ["prompts.jsonl", "line 1", "'text'"]),
    "no new tokens": (lambda f: {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
    "fewer than no new tokens": (lambda f: {"max_new_tokens": -3}, ["max_new_tokens", "-3"]),
    "no prompts wanted": (lambda f: {"max_prompts": 0}, ["max_prompts", "0"]),
    "no rows": (lambda f: {"batch_size": 0}, ["batch_size", "0"]),
    "a negative temperature": (lambda f: {"temperature": -1}, ["temperature", "-1"]),
    "a min_p above 1": (lambda f: {"min_p": 1.5}, ["min_p", "1.5"]),
    "a top_p of 0": (lambda f: {"top_p": 0}, ["top_p", "0"]),
    "a repetition penalty of 0": (lambda f: {"repetition_penalty": 0}, ["repetition_penalty", "0"]),
    "an unknown policy": (lambda f: {"policy": "nonsense"}, ["nonsense", "fixed:K"]),
    "a head that is not there": (lambda f: {"policy": "head:nowhere:0.5"}, ["nowhere"]),
    "an empty stop string": (lambda f: {"stop": '["a", ""]'}, ["stop"]),
    "an output that is a folder": (lambda f: {"out": f}, ["--out", "folder"]),
    "an output below a file": (lambda f: {"out": f / "prompts.jsonl" / "out.jsonl"}, ["--out", "prompts.jsonl"]),
    "a folder that cannot be written to": (lambda f: {"out": "/proc/out/out.jsonl"}, ["--out", "/proc/out"]),
    "an unknown dtype": (lambda f: {"dtype": "float8"}, ["dtype", "float8"]),
    "an unknown compile mode": (lambda f: {"compile": "fast"}, ["compile", "fast"]),
    "graphs without a GPU": (lambda f: {"compile": "graphs"}, ["'graphs'", "CUDA", "cpu"]),
    "a target that does not exist": (lambda f: {"target": f / "nowhere"}, ["--target", "nowhere"]),
    "an unknown flag": (lambda f: {"beams": 4}, ["beams"]),
}


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_that_names_it_and_nothing_is_written(name, run_warm, tmp_path, arguments):
    change, named = REFUSED[name]
    options = {**arguments, **change(tmp_path)}
    before = files_in(tmp_path)
    done = run_warm("generate", *(word for option in options for word in (f"--{option}", options[option])))
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("accept-head: error: ")
    for words in named:
        assert words in done.stderr
    assert files_in(tmp_path) == before, "something was written"
    assert done.stdout == ""
