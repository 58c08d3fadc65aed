"""Several folders of traces train one head: the held-out prompts, the errors, and the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import concatenate_datasets

from accept_head import InputError, Sampling
from accept_head.trace.shards import read_traces
from accept_head.training.learn.data import PackedTraces
from accept_head.training.learn.splits import read_splits, split_dev
from tests.examples import TRACES, write_traces

PROMPTS = 60
CONFIG = replace(TRACES, vocab_size=261, num_prompts=PROMPTS, sampling=Sampling(), seed=0, batch_size=30, shard_size=30)


@pytest.fixture
def folder_of(tmp_path, make_traces):
    """Makes a folder of traces; one seed, one set of responses. Prompts are the same in all."""

    def make(name, *, seed=0, **changes):
        config = replace(CONFIG, seed=seed, **changes)
        records = make_traces([(3, 5)] * config.num_prompts, seed=seed, alternatives=config.alternatives or 0)
        return write_traces(tmp_path / name, config, records)

    return make


def splits(*folders, dev=None, draft="b2", seed=0):
    return read_splits(list(folders), dev, draft_fingerprint=draft, seed=seed)


def rows(traces):
    return [(index, tuple(ids)) for index, ids in zip(traces["index"], traces["response_ids"], strict=True)]


def test_one_folder_is_split_as_ever(folder_of):
    folder = folder_of("a")
    config, traces = read_traces(folder)
    train, dev = split_dev(traces, folder, seed=3)
    both = splits(folder, seed=3)
    assert (rows(both.train), rows(both.dev)) == (rows(train), rows(dev))
    assert both.content() == config.content() and both.record() == {}


def test_alternatives_are_read_where_every_folder_has_them(folder_of):
    """A folder without leaves no holes: its neighbours' alternatives are passed over."""
    plain, dev = folder_of("plain"), folder_of("dev", seed=4)
    some, more = (folder_of(f"has {count}", seed=count, alternatives=count) for count in (2, 3))
    mixed, shared = splits(some, plain, dev=dev), splits(some, more, dev=dev)
    assert "alternative_ids" not in mixed.train.column_names
    assert rows(mixed.train) == rows(read_traces(some)[1]) + rows(read_traces(plain)[1])
    lengths = [len(ids) for ids in shared.train["alternative_ids"]]
    assert lengths == [2 * 5] * PROMPTS + [3 * 5] * PROMPTS
    for train, count in ((mixed.train, 0), (shared.train, 2)):  # of which a run reads as many as the fewest
        packed = PackedTraces(train, "prefix", r=0.15, seed=0, alternatives=count)[(0, 2 * PROMPTS - 1)]
        trace = train[2 * PROMPTS - 1]
        expected = [trace["alternative_ids"][3 * i : 3 * i + count] for i in range(5)] if count else [[]] * 5
        assert packed.alternative_ids[2:7].tolist() == expected


def test_traces_of_all_folders_train_in_the_order_given(folder_of):
    a, b, dev = folder_of("a"), folder_of("b", seed=1, num_prompts=20), folder_of("dev", seed=2)
    both = splits(b, a, dev=dev)
    assert rows(both.train) == rows(read_traces(b)[1]) + rows(read_traces(a)[1])
    assert rows(both.dev) == rows(read_traces(dev)[1])


def test_the_same_prompts_are_held_out_of_every_folder(folder_of):
    a, b, c = folder_of("a"), folder_of("b", seed=1), folder_of("c", seed=2, num_prompts=40)
    one, several = splits(a), splits(a, b, c)
    assert set(several.dev["index"]) == set(one.dev["index"])
    assert apart(several.train, several.dev)
    everything = rows(concatenate_datasets([read_traces(folder)[1] for folder in (a, b, c)]))
    assert sorted(rows(several.train) + rows(several.dev)) == sorted(everything)
    assert len(several.dev) > len(one.dev), "every folder judges"


def test_a_split_by_row_would_be_seen(folder_of):
    """Otherwise the test above says nothing."""
    together = concatenate_datasets([read_traces(folder)[1] for folder in (folder_of("a"), folder_of("b", seed=1))])
    held_out = torch.rand(len(together), generator=torch.Generator().manual_seed(0)) < 0.1
    train, dev = (together.select(torch.where(rows)[0].tolist()) for rows in (~held_out, held_out))
    assert not apart(train, dev)


def apart(train, dev):
    return not set(train["index"]) & set(dev["index"])


def test_scored_text_trains_and_never_judges(folder_of):
    said, scored = folder_of("said"), folder_of("scored", seed=1, responses="e5")
    for order in ((said, scored), (scored, said)):
        both = splits(*order)
        assert rows(both.dev) == rows(splits(said).dev)
        assert apart(both.train, both.dev)
        assert set(rows(both.train)) & set(rows(read_traces(scored)[1]))
        held_out = set(both.dev["index"])
        assert len(both.train) == 2 * (PROMPTS - len(held_out)), "what is held out of scored text does not train"


def test_scored_text_alone_needs_dev_traces(folder_of):
    scored, dev = folder_of("scored", responses="e5"), folder_of("dev", seed=2)
    assert len(splits(scored, dev=dev).train) == PROMPTS
    with pytest.raises(InputError, match=r"--traces .*scored.*--dev_traces"):
        splits(scored)
    with pytest.raises(InputError, match=r"scored: .*--responses.*dev traces"):
        splits(dev, dev=scored)


def test_wrong_folders_are_refused_by_name(folder_of, tmp_path):
    good = folder_of("good")
    copy = folder_of("copy")
    for name, named, changes in (
        ("target", "another pair", {"target_fingerprint": "z9"}),
        ("hot", "temperature=1.5", {"sampling": Sampling(temperature=1.5)}),
    ):
        wrong = folder_of(name, seed=1, **changes)
        for options in ({"dev": wrong}, {}):
            given = [good] if options else [good, wrong]
            option = "--dev_traces" if options else "--traces"
            with pytest.raises(InputError, match=rf"^{option} {wrong}: .*{named}"):
                splits(*given, **options)
    with pytest.raises(InputError, match=rf"^{folder_of('draft', seed=1, draft_fingerprint='z9')}: .*another pair"):
        splits(good, tmp_path / "draft")
    for twin in (good, copy, tmp_path / "good" / ".." / "good"):
        with pytest.raises(InputError, match=rf"^--traces {twin}: .*same traces as {good};"):
            splits(good, twin)
    with pytest.raises(InputError, match="--traces is an empty list"):
        splits()
    with pytest.raises(InputError, match="nowhere: no such trace folder"):
        splits(good, Path("nowhere"))


def test_the_record_says_what_each_folder_was(folder_of):
    said, scored = (
        folder_of("said"),
        folder_of("scored", seed=1, num_prompts=40, prompts_fingerprint="f6", responses="e5"),
    )
    both = splits(said, scored)
    assert both.content() == [config.content() for config in both.configs]
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    first, second = both.record()["traces"]
    assert first == {
        "folder": str(said), "fingerprint": CONFIG.fingerprint(), "sampling": sampling, "num_prompts": PROMPTS,
        "seed": 0, "prompts_fingerprint": "d4", "responses": None,
    }  # fmt: skip
    assert (second["folder"], second["seed"], second["num_prompts"]) == (str(scored), 1, 40)
    assert (second["prompts_fingerprint"], second["responses"]) == ("f6", "e5")
