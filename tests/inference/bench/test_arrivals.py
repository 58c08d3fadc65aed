"""Arrival traces in three formats, the prompt for each request, and requests that reach the loop on time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import make_policy
from accept_head.inference.bench.arrivals import Arrival, Paced, match_prompts, read_trace
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from tests.inference.support.toy import TOKENS, ragged_prompts, toy_pair

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SAMPLES = Path(__file__).parents[4] / "shared" / "data" / "traces"

FORMATS = {
    "azure": AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,318,8\n",
    "azure, with a time zone": AZURE + "2024-05-10 23:59:59.500000+00:00,4808,10\n2024-05-11 00:00:00+00:00,318,8\n",
    "burstgpt": BURST + "5,ChatGPT,4808,10,4818,Conversation log\n5.5,GPT-4,318,8,326,API log\n",
    "mooncake": '{"timestamp": 27000, "input_length": 4808, "output_length": 10, "hash_ids": [1, 2]}\n'
    '{"timestamp": 27500, "input_length": 318, "output_length": 8, "hash_ids": []}\n',
}


def write(folder, text, name="trace.txt"):
    path = folder / name
    path.write_text(text)
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_the_same(tmp_path, name):
    first, second = read_trace(write(tmp_path, FORMATS[name]))
    assert first == Arrival(0.0, 4808, 10)
    assert (second.prompt_tokens, second.output_tokens) == (318, 8)
    assert second.seconds == pytest.approx(0.5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_trace_may_be_gzipped(tmp_path, name):
    (tmp_path / "trace.gz").write_bytes(gzip.compress(FORMATS[name].encode()))
    assert read_trace(tmp_path / "trace.gz") == read_trace(write(tmp_path, FORMATS[name]))


def test_columns_may_stand_in_any_order_and_blank_lines_anywhere(tmp_path):
    text = "\ufeffSession,GeneratedTokens, TIMESTAMP ,ContextTokens\n\n7,8,2023-11-16 00:00:01,9\n\n"
    assert read_trace(write(tmp_path, text)) == [Arrival(0.0, 9, 8)]


def test_arrivals_are_in_the_order_of_time_and_failed_requests_are_left_out(tmp_path):
    text = BURST + "9,m,1,5,6,x\n3,m,2,0,2,x\n4,m,3,5,8,x\n"
    assert read_trace(write(tmp_path, text)) == [Arrival(0.0, 3, 5), Arrival(5.0, 1, 5)]


def test_so_many_requests_are_the_first(tmp_path):
    path = write(tmp_path, BURST + "".join(f"{10 + t},m,{t},5,6,x\n" for t in (0, 4, 1, 6, 9)))
    assert [(a.seconds, a.prompt_tokens) for a in read_trace(path, 3)] == [(0, 0), (1, 1), (4, 4)]


GOOD_AZURE, GOOD_BURST = "2023-11-16 18:17:03,1,1\n", "1,m,1,1,2,x\n"
GOOD_LINE = json.dumps({"timestamp": 1, "input_length": 2, "output_length": 3}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (AZURE, "has no requests"),
        (AZURE + "2023-11-16 18:17:03,1,0\n", "has no requests"),
        ("time,in,out\n1,2,3\n", "line 1: columns are ['time', 'in', 'out'], expected TIMESTAMP, ContextTokens"),
        (AZURE + GOOD_AZURE + "yesterday,1,1\n", "line 3: TIMESTAMP is 'yesterday', expected a date and time"),
        (AZURE + GOOD_AZURE + "\n2023-11-16 18:17:03,1\n", "line 4: has 2 of 3 columns"),
        (AZURE + "2023-11-16 18:17:03,1,many\n", "line 2: GeneratedTokens is 'many', expected a number of tokens"),
        (AZURE + "2023-11-16 18:17:03,-4,1\n", "line 2: ContextTokens is '-4', expected a number of tokens"),
        (BURST + GOOD_BURST + "soon,m,1,1,2,x\n", "line 3: Timestamp is 'soon', expected a time of 0 or more"),
        (BURST + "-1,m,1,1,2,x\n", "line 2: Timestamp is '-1'"),
        (BURST + "nan,m,1,1,2,x\n", "line 2: Timestamp is 'nan'"),
        (BURST + "inf,m,1,1,2,x\n", "line 2: Timestamp is 'inf'"),
        (BURST + "1,m,1.5,1,2,x\n", "line 2: Request tokens is '1.5', expected a number of tokens"),
        (GOOD_LINE + "{oops\n", "line 2: is not JSON"),
        (GOOD_LINE + "[1, 2]\n", "line 2: is list, expected an object with timestamp, input_length, output_length"),
        (GOOD_LINE + '{"timestamp": 1, "input_length": 2}\n', "line 2: field 'output_length' is missing"),
        ('{"timestamp": true, "input_length": 2, "output_length": 3}\n', "line 1: timestamp is True"),
        ('{"timestamp": 1, "input_length": null, "output_length": 3}\n', "line 1: input_length is None"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, "no such file"),
        ("plain.gz", b"not gzipped", "not readable"),
        ("b.csv", b"\xff\xfe", "not"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_trace(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "requests", "seconds"),
    [
        ("AzureLLMInferenceTrace_code_2023.csv", 8819, 3436),
        ("mooncake_conversation_trace.jsonl.gz", 12031, 3537),
        ("mooncake_synthetic_trace.jsonl", 3993, 1022),
    ],
)
def test_the_published_traces_are_read_whole(name, requests, seconds):
    if not (SAMPLES / name).is_file():
        pytest.skip("the shared data are not here")
    arrivals = read_trace(SAMPLES / name)
    assert len(arrivals) == requests
    assert arrivals[-1].seconds == pytest.approx(seconds, abs=1)


# --- prompts ----------------------------------------------------------------------------------------------------------


def asking(*lengths):
    return [Arrival(float(index), length, 1) for index, length in enumerate(lengths)]


def test_the_prompt_of_the_nearest_length_is_used_once():
    chosen, by = match_prompts(asking(12, 12, 9, 30), [10, 13, 31, 11, 12])
    assert by == "length"
    assert chosen == [4, 3, 0, 2]


def test_all_prompts_are_used_before_any_is_used_again():
    chosen, by = match_prompts(asking(5, 5, 6, 5, 5), [5, 7])
    assert (chosen, by) == ([0, 1, 0, 1, 0], "length")


def test_where_most_requests_are_longer_than_all_prompts_they_come_in_order():
    assert match_prompts(asking(900, 12, 800, 700), [10, 20, 30]) == ([0, 1, 2, 0], "order")
    assert match_prompts(asking(900, 12, 800, 21), [10, 20, 30])[1] == "length"


# --- pacing -----------------------------------------------------------------------------------------------------------


class Clock:
    """Goes on by so many seconds each time it is read."""

    def __init__(self, tick=0.0, start=100.0):
        self.seconds, self.tick = start, tick

    def __call__(self):
        self.seconds += self.tick
        return self.seconds


def test_a_request_is_handed_out_when_its_time_has_come_and_not_before():
    clock = Clock()
    first, second, third = make_requests([[1], [2], [3]], 4)
    paced = Paced([first, second, third], [0.0, 2.0, 2.0], clock)
    clock.seconds = 500.0  # the time before the loop asks does not count
    assert next(paced) is first and next(paced) is None
    clock.seconds += 1.999
    assert next(paced) is None and paced.now == pytest.approx(1.999)
    clock.seconds += 0.5
    assert next(paced) is second and next(paced) is third
    assert paced.handed == pytest.approx([0.0, 2.499, 2.499])
    with pytest.raises(StopIteration):
        next(paced)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_loop_decodes_what_arrives_and_ends_with_the_last(batch):
    """The clock moves only when it is read, at every look for a request: no real second matters."""
    pair, prompts = toy_pair(), ragged_prompts(5, vocab=TOKENS, longest=6)
    requests, times = make_requests(prompts, 6), [0.0, 0.1, 8.0, 8.0, 30.0]
    policy = make_policy("fixed:2", pair.draft)
    decoder = make_decoder(pair.target, pair.draft, requests, policy, batch_size=batch, greedy=True)
    processing = Processing(Sampling(temperature=0), pair.vocab_size)

    def run(these):
        stopping = Stopping([], [], torch.device("cpu"))
        return list(decoder.run(these, policy=policy, processing=processing, stopping=stopping))

    paced = Paced(requests, times, Clock(tick=0.25))
    arrived = {done.request.index: done.token_ids for done in run(paced)}
    assert arrived == {done.request.index: done.token_ids for done in run(requests)}
    assert all(handed >= time for handed, time in zip(paced.handed, times, strict=True))
    assert paced.handed == sorted(paced.handed)
    assert paced.handed[2] < 30  # the third did not wait for the last
