"""Prompt files and data sets, and the message for every way in which they can be wrong."""

from __future__ import annotations

import json

import datasets
import pytest

from accept_head import InputError
from accept_head.prompts import load_prompts, prompts_fingerprint

MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
]


@pytest.fixture
def tokenizer(byte_tokenizer):
    return byte_tokenizer()


@pytest.fixture
def prompts_file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_raw_text_is_tokenized_as_the_tokenizer_does_it(tokenizer, prompts_file):
    texts = ["Once upon a time", "ünïcode\u2028 and a line separator", "x"]
    path = prompts_file(*({"prompt": text} for text in texts))
    prompts = load_prompts(str(path), tokenizer)
    assert [list(prompt.ids) for prompt in prompts] == [tokenizer(text)["input_ids"] for text in texts]
    assert prompts[2].ids == (1, tokenizer.convert_tokens_to_ids("x"))  # its begin token is added, and no other
    assert [(prompt.index, prompt.id, prompt.domain) for prompt in prompts] == [
        (0, "0", ""),
        (1, "1", ""),
        (2, "2", ""),
    ]


def test_a_line_separator_inside_a_text_does_not_end_the_record(tokenizer, prompts_file):
    """JSON allows U+2028, U+2029 and U+0085 unescaped inside a string; JSONL ends lines with a newline only."""
    text = "one\u2028two\u2029three\u0085four"
    path = prompts_file(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    (prompt,) = load_prompts(str(path), tokenizer)
    assert list(prompt.ids) == tokenizer(text)["input_ids"]


def test_id_and_domain_come_from_the_record(tokenizer, prompts_file):
    path = prompts_file({"id": "a-7", "domain": "maths", "prompt": "1"}, {"id": 12, "prompt": "2"})
    assert [(p.id, p.domain) for p in load_prompts(str(path), tokenizer)] == [("a-7", "maths"), ("12", "")]


def test_messages_go_through_the_chat_template_once(tokenizer, prompts_file):
    path = prompts_file({"messages": MESSAGES})
    (prompt,) = load_prompts(str(path), tokenizer, field="messages")
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == "<bos><|user|>Hi<|assistant|>Hello<|user|>2+2?<|assistant|>"
    assert list(prompt.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(prompt.ids) != tokenizer(text)["input_ids"], "a second begin token would not be seen"


def test_blank_lines_are_skipped_and_a_last_newline_is_not_needed(tokenizer, prompts_file):
    path = prompts_file("\n", {"prompt": "a"}, "   \n", "\n", '{"prompt": "b"}')
    assert [prompt.index for prompt in load_prompts(str(path), tokenizer)] == [0, 1]


def test_max_prompts_takes_the_first_ones(tokenizer, prompts_file):
    path = prompts_file(*({"prompt": text} for text in "abc"))
    for count in (1, 2, 3, 9):
        first = load_prompts(str(path), tokenizer, max_prompts=count)
        assert [list(prompt.ids) for prompt in first] == [tokenizer(text)["input_ids"] for text in "abc"[:count]]


def test_a_folder_is_read_as_a_data_set(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    records = [{"id": str(i), "domain": "d", "question": f"number {i}"} for i in range(4)]
    (folder / "test.json").write_text(json.dumps(records))
    prompts = load_prompts(str(folder), tokenizer, field="question", split="test", max_prompts=3)
    assert [(p.id, p.domain, list(p.ids)) for p in prompts] == [
        (r["id"], "d", tokenizer(r["question"])["input_ids"]) for r in records[:3]
    ]
    with pytest.raises(InputError, match=r"set, record 0.*'prompt'"):
        load_prompts(str(folder), tokenizer, split="test")
    with pytest.raises(InputError, match=r"set.*nosuchsplit"):
        load_prompts(str(folder), tokenizer, field="question", split="nosuchsplit")


def test_a_data_set_of_messages_goes_through_the_chat_template(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.json").write_text(json.dumps([{"messages": MESSAGES}, {"messages": MESSAGES[:1]}]))
    prompts = load_prompts(str(tmp_path / "set"), tokenizer, field="messages")
    expected = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"]
        for m in (MESSAGES, MESSAGES[:1])
    ]
    assert [list(prompt.ids) for prompt in prompts] == expected


def test_fingerprint_tells_different_prompts_apart(tokenizer, prompts_file):
    def fingerprint(*records):
        return prompts_fingerprint(load_prompts(str(prompts_file(*records)), tokenizer))

    base = fingerprint({"prompt": "a"}, {"prompt": "b"})
    assert base == fingerprint({"prompt": "a"}, {"prompt": "b", "note": "not used"})
    assert len({base, fingerprint({"prompt": "a"}), fingerprint({"prompt": "b"}, {"prompt": "a"})}) == 3
    assert base != fingerprint({"prompt": "a", "domain": "d"}, {"prompt": "b"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "no prompts"),
        (["\n\n"], "no prompts"),
        (['{"prompt": "a"}\n', "prompt: b\n"], "line 2.*not JSON"),
        (['{"prompt": "a"}\n', "\n", '{"prompt": \n'], "line 3.*not JSON"),
        (['["a"]\n'], "line 1.*list"),
        (['{"prompt": "a"}\n', '{"text": "b"}\n'], "line 2.*'prompt'.*text"),
        (["{}\n"], "line 1.*'prompt'"),
        (['{"prompt": 7}\n'], "line 1.*'prompt'.*int"),
        (['{"prompt": null}\n'], "line 1.*'prompt'.*NoneType"),
        (['{"prompt": []}\n'], "line 1.*'prompt'.*list"),
        (['{"prompt": [{"role": "user"}]}\n'], "line 1.*'prompt'.*list"),
        (['{"prompt": "' + "a" * 50 + '"}\n'], "line 1.*51 tokens.*20"),
    ],
)
def test_a_wrong_file_is_one_sentence_naming_the_file_the_line_and_the_field(tokenizer, prompts_file, lines, message):
    path = prompts_file(*lines)
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(str(path), tokenizer, max_prompt_tokens=20)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_of_just_the_longest_length_is_taken(tokenizer, prompts_file):
    path = prompts_file({"prompt": "a" * 19})
    assert len(load_prompts(str(path), tokenizer, max_prompt_tokens=20)[0].ids) == 20


def test_messages_without_a_chat_template_are_refused(byte_tokenizer, prompts_file):
    path = prompts_file({"prompt": MESSAGES})
    with pytest.raises(InputError, match=r"line 1.*'prompt'.*no chat template"):
        load_prompts(str(path), byte_tokenizer(chat_template=None))


def test_a_template_that_refuses_the_messages_is_an_input_error(byte_tokenizer, prompts_file):
    """Llama's and Gemma's templates raise on a role or an order of roles that they do not know."""
    template = "{{ raise_exception('roles must alternate') }}"
    path = prompts_file({"prompt": MESSAGES})
    with pytest.raises(InputError, match=r"line 1.*roles must alternate"):
        load_prompts(str(path), byte_tokenizer(chat_template=template))


def test_text_with_no_tokens_is_refused(byte_tokenizer, prompts_file):
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(InputError, match=r"line 1.*no tokens"):
        load_prompts(str(prompts_file({"prompt": ""})), tokenizer)


def test_bytes_that_are_not_text_are_refused(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"prompts\.jsonl.*UTF-8"):
        load_prompts(str(path), tokenizer)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.json", "no/such/data-set"])
def test_a_missing_source_is_named(tokenizer, tmp_path, name):
    with pytest.raises(InputError, match=name):
        load_prompts(str(tmp_path / name), tokenizer)
