"""The files of a trace folder: `trace_config.json`, and parquet shards with a fixed number of prompts each.

The config determines which shards a folder must have, so completeness is derived and never recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accept_head.checksum import check_parquet, seal_parquet
from accept_head.errors import InputError, one_line
from accept_head.files import atomic_path
from accept_head.trace.columns import ALTERNATIVE_COLUMNS, DRAFT_COLUMNS, POSITION_COLUMNS, trace_features
from accept_head.trace.config import TraceConfig
from accept_head.trace.values import check_values

if TYPE_CHECKING:
    from datasets import Dataset


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def write_shard(folder: Path, shard: int, records: Sequence[dict[str, Any]]) -> None:
    """Write one shard atomically, with a checksum of all its bytes."""
    from datasets import Dataset

    alternatives = bool(records) and "alternative_ids" in records[0]
    dataset = Dataset.from_list(list(records), features=trace_features(alternatives=alternatives))
    with atomic_path(shard_path(folder, shard)) as temporary:
        dataset.to_parquet(temporary, write_page_checksum=True)
        seal_parquet(temporary)


def missing_shards(folder: Path, config: TraceConfig) -> list[int]:
    """Numbers of the shards that the folder lacks."""
    return [shard for shard in range(config.num_shards) if not shard_path(folder, shard).exists()]


def check_shard(folder: Path, config: TraceConfig, shard: int) -> None:
    """Raises InputError naming the shard when it is damaged, or when it is another shard or from other traces."""
    _read_table(folder, config, shard)


def read_traces(folder: Path) -> tuple[TraceConfig, Dataset]:
    """Read and validate a trace folder. Records are in the order of the prompts.

    Raises InputError naming the folder, shard or column when a shard is missing, truncated or inconsistent.
    """
    from datasets import concatenate_datasets

    config = finished_config(folder)
    return config, concatenate_datasets([read_shard(folder, config, shard) for shard in range(config.num_shards)])


def finished_config(folder: Path) -> TraceConfig:
    """The config of a folder that has all its shards. Raises InputError naming the folder when some are missing."""
    config = TraceConfig.load(folder)
    if missing := missing_shards(folder, config):
        if (folder / "model.safetensors").is_file():
            raise InputError(f"{folder}: this is a head, expected a folder of traces")
        raise InputError(
            f"{folder}: {len(missing)} of {config.num_shards} shards are missing (first: "
            f"{shard_path(folder, missing[0]).name}); run the same `accept-head collect` again to finish it"
        )
    return config


def read_shard(folder: Path, config: TraceConfig, shard: int) -> Dataset:
    """Read and validate the records of one shard. Raises InputError naming the shard or column."""
    from datasets import Dataset

    return Dataset(_read_table(folder, config, shard))


def _read_table(folder: Path, config: TraceConfig, shard: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = shard_path(folder, shard)
    first, rows = shard * config.shard_size, config.shard_rows(shard)
    schema = trace_features(alternatives=config.alternatives is not None).arrow_schema
    try:
        check_parquet(path)
        table = pq.read_table(path, page_checksum_verification=True, memory_map=True)
        table = table.select(schema.names).cast(pa.schema(list(schema)))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: damaged or not a trace shard ({one_line(error)}); the same `accept-head collect` with --repair "
            "true makes it anew"
        ) from None
    if table.num_rows != rows:
        raise InputError(f"{path}: {table.num_rows} records, expected {rows}")
    for name in schema.names:
        column = table[name].combine_chunks()
        if column.null_count or (pa.types.is_list(column.type) and column.flatten().null_count):
            raise InputError(f"{path}: column {name!r} has a null in it")
    if table["index"].to_pylist() != list(range(first, first + rows)):
        raise InputError(f"{path}: column 'index' does not number prompts {first} to {first + rows - 1}")
    lengths = pc.list_value_length(table["response_ids"])
    for name in POSITION_COLUMNS:
        times = config.depths if config.depths and name in DRAFT_COLUMNS else 1
        if not pc.all(pc.equal(pc.list_value_length(table[name]), pc.multiply(lengths, times))).as_py():
            how = "as long" if times == 1 else f"{times} times as long"
            raise InputError(f"{path}: column {name!r} is not {how} as 'response_ids' in every record")
    for name in ALTERNATIVE_COLUMNS if config.alternatives is not None else ():
        if not pc.all(pc.equal(pc.list_value_length(table[name]), pc.multiply(lengths, config.alternatives))).as_py():
            raise InputError(f"{path}: column {name!r} is not {config.alternatives} times as long as 'response_ids'")
    unknown: tuple[str, ...] = () if config.scored else ("overlap", "target_logprob", "divergence")
    if config.depths:  # infinite for a drafter that lacks tokens of the target
        unknown += ("divergence",)
    check_values(path, table, vocab_size=config.vocab_size, unknown=unknown)
    return table.replace_schema_metadata(schema.metadata)
