"""Files with a checksum inside: every flipped bit is found, and files without a checksum can still be read."""

import random
import re
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from accept_head.checksum import LENGTH, MARK, check_parquet, read_tensors, save_tensors, seal_parquet
from accept_head.errors import InputError


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# --- parquet

OPTIONS = {"write_page_checksum": True, "store_schema": False}  # a file of few bits


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    return pa.table({"value": generator.random(8, dtype=np.float32)})


@pytest.fixture
def sealed(table, tmp_path):
    path = tmp_path / "sealed.parquet"
    pq.write_table(table, path, **OPTIONS)
    seal_parquet(path)
    return path


def test_a_sealed_file_is_parquet_to_everybody_else(sealed, table):
    check_parquet(sealed)
    assert pq.read_table(sealed).equals(table)
    assert pq.read_table(sealed, page_checksum_verification=True, memory_map=True).equals(table)
    assert pq.ParquetFile(sealed).metadata.num_rows == 8


def test_no_flipped_bit_of_a_sealed_file_goes_unnoticed(sealed):
    """All bits by which the seal is found, and a sample; benchmarks/faults.py flips every bit of a shard."""
    data = sealed.read_bytes()
    mark, last = 8 * data.index(MARK), 8 * len(data)
    finding = [*range(mark, mark + 8 * len(MARK)), *range(last - 64, last)]
    for bit in [*finding, *random.Random(0).sample(range(last), 300)]:
        sealed.write_bytes(flipped(data, bit))
        with pytest.raises(ValueError, match="SHA-256"):
            check_parquet(sealed)
    sealed.write_bytes(data)
    check_parquet(sealed)


@pytest.mark.parametrize("change", [lambda d: d + b"\0", lambda d: d[:-1], lambda d: d[:50] + d[51:], lambda d: d + d])
def test_bytes_added_or_lost_are_noticed(sealed, change):
    sealed.write_bytes(change(sealed.read_bytes()))
    with pytest.raises(ValueError, match="SHA-256"):
        check_parquet(sealed)


@pytest.mark.parametrize("length", [0, 3, 8, 100])
def test_files_that_were_never_sealed_pass_whatever_they_are(tmp_path, length):
    path = tmp_path / "other"
    path.write_bytes(bytes(length))
    check_parquet(path)


def test_a_sealed_file_that_another_program_rewrites_is_a_file_without_a_seal(sealed, table):
    pq.write_table(pq.read_table(sealed), sealed)
    assert MARK not in sealed.read_bytes()
    check_parquet(sealed)
    assert pq.read_table(sealed).equals(table)


def test_the_seal_is_where_it_says(sealed, table, tmp_path):
    """All pages before it, the footer after it: taken out, the file is the one that was sealed."""
    pq.write_table(table, tmp_path / "bare.parquet", **OPTIONS)
    data = sealed.read_bytes()
    assert data.count(MARK) == 1
    start = data.index(MARK)
    assert data[:start] + data[start + LENGTH :] == (tmp_path / "bare.parquet").read_bytes()


# --- safetensors


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "float": torch.randn(3, 2, generator=generator),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 5),
        "number": torch.tensor(7),
        "rows": torch.arange(12).reshape(3, 4)[:, :2],  # not contiguous
    }


def test_tensors_are_read_as_they_were_written(tensors, tmp_path):
    tensors["rows"] = tensors["rows"].contiguous()
    save_tensors(tensors, tmp_path / "t")
    found = read_tensors(tmp_path / "t", tensors)
    assert list(found) == list(tensors)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert list(read_tensors(tmp_path / "t", ["flags"])) == ["flags"]


def test_a_file_of_tensors_is_never_there_under_a_name_that_nobody_knows(tensors, tmp_path, monkeypatch):
    """safetensors' own way of writing makes such a file, for the time it takes."""
    opened = []
    real = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: (opened.append(path), real(path, data)))
    save_tensors({"float": tensors["float"]}, tmp_path / "t")
    assert opened == [tmp_path / "t"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_the_same_tensors_are_the_same_bytes_in_any_order(tensors, tmp_path):
    tensors["rows"] = tensors["rows"].contiguous()
    for name, chosen in (("a", tensors), ("b", dict(reversed(tensors.items())))):
        save_tensors(chosen, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_flipped_bit_of_a_file_of_tensors_goes_unnoticed(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}
    path = tmp_path / "tensors"
    save_tensors(tensors, path)
    data = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(data)), 500):
        path.write_bytes(flipped(data, bit))
        with pytest.raises(InputError, match=f"^{re.escape(str(path))}: damaged"):
            read_tensors(path, tensors)


def test_without_checksums_a_flipped_bit_is_another_number_and_nobody_knows(tensors, tmp_path):
    """The file is older than checksums, and read; which shows that the checksums are what finds it."""
    path = tmp_path / "old"
    save_file({"float": tensors["float"]}, path)
    assert torch.equal(read_tensors(path, ["float"])["float"], tensors["float"])
    data = path.read_bytes()
    path.write_bytes(flipped(data, 8 * len(data) - 3))
    assert not torch.equal(read_tensors(path, ["float"])["float"], tensors["float"])


def test_a_tensor_that_is_not_there_and_a_file_that_is_not_there_are_input_errors(tensors, tmp_path):
    save_tensors({"float": tensors["float"]}, tmp_path / "t")
    with pytest.raises(InputError, match="other"):
        read_tensors(tmp_path / "t", ["other"])
    with pytest.raises(InputError, match="nowhere"):
        read_tensors(tmp_path / "nowhere", ["float"])


def test_others_read_the_file_as_plain_safetensors(tensors, tmp_path):
    save_tensors({"float": tensors["float"]}, tmp_path / "t")
    with safe_open(tmp_path / "t", framework="np") as file:
        assert np.array_equal(file.get_tensor("float"), tensors["float"].numpy())
