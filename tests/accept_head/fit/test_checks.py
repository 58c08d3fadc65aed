"""What a fit checks before anything is made."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from accept_head import InputError
from accept_head.console import make_console
from accept_head.files import locked, write_json
from accept_head.fit.plan import Plan, check_disk
from accept_head.fit.verb import RECORD, check_same, warn_of_templates


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    plan = Plan(train=300, dev=60, test=60, seconds={})
    check_disk(tmp_path, plan, 100, 96, position=90)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    with pytest.raises(InputError, match=r"the traces need about .*, but .* are free"):
        check_disk(tmp_path, plan, 100, 96, position=90)


@pytest.mark.parametrize("of_draft", ["the same", "another", None])
def test_other_chat_templates_are_remarked(of_draft, byte_tokenizer, tmp_path, capsys):
    target = byte_tokenizer()
    template = {"the same": target.chat_template, "another": "{{ messages }}", None: None}[of_draft]
    byte_tokenizer(chat_template=template).save_pretrained(tmp_path)
    models = {"draft": str(tmp_path), "trust_remote_code": False}
    warn_of_templates(make_console(unseen_width=200), models, SimpleNamespace(tokenizer=target))
    assert ("different chat templates: the target's is used" in capsys.readouterr().out) == (of_draft == "another")


def test_a_folder_that_was_begun_otherwise_is_refused_by_option(tmp_path):
    write_json(tmp_path / RECORD, {"asked": {"seed": 0, "dtype": "auto"}, "plan": {}})
    check_same(tmp_path / RECORD, {"seed": 0, "dtype": "auto"})
    with pytest.raises(InputError, match="begun with dtype 'auto', not 'bfloat16'; give another --out"):
        check_same(tmp_path / RECORD, {"seed": 0, "dtype": "bfloat16"})


def test_a_folder_has_one_process_at_a_time(tmp_path):
    refused = pytest.raises(InputError, match="another accept-head process is at work there")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
