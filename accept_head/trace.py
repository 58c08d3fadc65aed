"""Coupled traces: what collect writes and everything else reads.

One record is one target response with, at each of its positions, the token that the draft would have proposed and how
the proposal would have fared. A folder of traces is `trace_config.json` and parquet shards of a fixed number of
prompts. Which shards a folder must have follows from its config, so completeness is derived, never recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accept_head.checksum import check_parquet, seal_parquet
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, sha256, write_json
from accept_head.sampling import Sampling
from accept_head.trace_values import check_values

if TYPE_CHECKING:
    from datasets import Dataset, Features

TRACE_VERSION = 2
CONFIG_NAME = "trace_config.json"
MOST_SHARDS = 100_000
ORIGINS = ("target", "draft", "target_revision", "draft_revision", "dtype", "dataset")
# Fields that older traces lack.
LATER = ("responses", "target_revision", "draft_revision", "dtype", "dataset", "backend", "alternatives")
IMPORTED, UNSCORED = "specdecpp:", "specdecpp-unscored:"  # what `responses` begins with, of imported traces

# Per position i of the response, all of the response's length:
POSITION_COLUMNS = {
    "response_ids": "int32",  # X_i, the target's token
    "draft_ids": "int32",  # Y_i ∼ q, coupled with X_i
    "accepted": "bool",  # whether Y_i is accepted; then Y_i = X_i. Of scored text: whether Y_i = X_i
    "acceptance": "float32",  # a(Y_i) = min(1, p(Y_i)/q(Y_i)), the label
    "overlap": "float32",  # β_i = Σ min(p, q), the expected acceptance before Y_i is drawn
    "target_logprob": "float32",  # log p(X_i)
    # KL(p ‖ q), nats, of both models' softmax at this temperature (1 when greedy), before top-k and such: they would
    # make it infinite. A lagging signal: a policy may know it of verified positions only (DSDE).
    "divergence": "float32",
    # The draft signals (signals.py), of the plain softmax when decoding is greedy:
    "draft_logprob": "float32",  # log q(Y_i)
    "draft_entropy": "float32",  # −Σ q log q, nats
    "draft_max_prob": "float32",  # max_y q(y)
}


# What else the draft might have drawn (alternatives.py): of each position TraceConfig.alternatives, one position after
# the other. Only where the config has them.
ALTERNATIVE_COLUMNS = {
    "alternative_ids": "int32",  # Y' ∼ q
    "alternative_logprob": "float32",  # log q(Y')
    "alternative_acceptance": "float32",  # a(Y')
}
MOST_ALTERNATIVES = 1024


def trace_features(*, alternatives: bool = False) -> Features:
    """The schema of one record, as `datasets.Features`."""
    from datasets import Features, List, Value

    kinds = POSITION_COLUMNS | (ALTERNATIVE_COLUMNS if alternatives else {})
    columns = {name: List(Value(kind)) for name, kind in kinds.items()}
    return Features(
        {
            "index": Value("int64"),  # the prompt's line in the prompts file
            "id": Value("string"),
            "domain": Value("string"),  # "" when the prompts name none
            "finished": Value("bool"),  # whether the response ended by itself, with an end-of-sequence token
            "prompt_ids": List(Value("int32")),
            **columns,
        }
    )


def fingerprint_of(written: Mapping[str, Any]) -> str:
    """TraceConfig.fingerprint of what is in a trace_config.json."""
    content = {key: value for key, value in written.items() if key not in ORIGINS}
    return sha256(json.dumps(content, sort_keys=True))


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """How a folder of traces was made. Two runs with equal configs write the same records.

    target, draft: name and fingerprint. vocabulary: fingerprint of the tokenizer. prompts: SHA-256 of the prompts used.
    vocab_size: ids that both models score. end_token_ids: ids that end a response.
    num_prompts: records in the folder. shard_size: records a shard. batch_size: prompts generated together; it decides
    which random numbers a response gets.
    responses: fingerprint of the traces whose responses these are, scored again under other sampling settings
    (`collect --responses`); None when the target said them under these settings. Of traces that
    `import-specdecpp` made, IMPORTED or UNSCORED and the SHA-256 of the data. See `check_coupled` and `check_scored`.
    target_revision, draft_revision: commits of models that came from the Hub. dtype: the draft's, as it was loaded.
    dataset: name of the data set that the prompts were read from.
    backend: what generated the responses, if not transformers: it has other random numbers.
    alternatives: further draws of the draft at each position; None when there are none.
    """

    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    vocabulary_fingerprint: str
    prompts_fingerprint: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    num_prompts: int
    sampling: Sampling
    max_new_tokens: int
    seed: int
    batch_size: int
    shard_size: int
    version: int = TRACE_VERSION
    responses: str | None = None
    target_revision: str | None = None
    draft_revision: str | None = None
    dtype: str | None = None
    dataset: str | None = None
    backend: str | None = None
    alternatives: int | None = None

    @property
    def scored(self) -> bool:
        """Whether what takes a target's forward is known: overlap, target_logprob and divergence. NaN if not."""
        return self.responses is None or not self.responses.startswith(UNSCORED)

    @property
    def num_shards(self) -> int:
        return -(-self.num_prompts // self.shard_size)

    def shard_rows(self, shard: int) -> int:
        return min(self.shard_size, self.num_prompts - shard * self.shard_size)

    def content(self) -> dict[str, Any]:
        """What decides the records: everything but where the models and prompts came from, which changes when a folder
        moves, and what older traces do not say."""
        return {key: value for key, value in self._written().items() if key not in ORIGINS}

    def fingerprint(self) -> str:
        """SHA-256 of all that decides the records."""
        return fingerprint_of(self._written())

    def save(self, folder: Path) -> None:
        write_json(folder / CONFIG_NAME, self._written())

    def _written(self) -> dict[str, Any]:
        """The fields, without LATER ones that say nothing: older traces lack them, and keep their fingerprint."""
        return {key: value for key, value in asdict(self).items() if key not in LATER or value is not None}

    @classmethod
    def load(cls, folder: Path) -> TraceConfig:
        """Raises InputError naming the file or field when it is missing or not of this version."""
        path = folder / CONFIG_NAME
        if not folder.is_dir():
            raise InputError(f"{folder}: no such trace folder")
        if not path.exists():
            raise InputError(f"{folder}: no {CONFIG_NAME} in it, so it is not a trace folder")
        values = read_json(path)
        if values.get("version") != TRACE_VERSION:
            raise InputError(
                f"{path}: version is {values.get('version')!r}, expected {TRACE_VERSION}; collect these traces again"
            )
        values = {**dict.fromkeys(LATER), **values}
        if wrong := sorted(set(values) ^ {field.name for field in fields(cls)}):
            raise InputError(f"{path}: field {wrong[0]!r} is {'unknown' if wrong[0] in values else 'missing'}")
        values["sampling"] = _read_sampling(path, values["sampling"])
        values["end_token_ids"] = _read_ids(path, values["end_token_ids"])
        return cls(**values)._checked(path)

    def _checked(self, path: Path) -> TraceConfig:
        texts: dict[Any, Any] = {"str": str, "str | None": str | None}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in texts and not isinstance(value, texts[field.type]):
                raise InputError(f"{path}: field {field.name!r} is {value!r}, expected text")
            if field.type == "int" and (type(value) is not int or value < (0 if field.name == "seed" else 1)):
                raise InputError(f"{path}: field {field.name!r} is {value!r}, expected a positive integer")
        drawn = self.alternatives
        if drawn is not None and not (type(drawn) is int and 1 <= drawn <= MOST_ALTERNATIVES):
            raise InputError(f"{path}: field 'alternatives' is {drawn!r}, expected 1 to {MOST_ALTERNATIVES}")
        if self.num_shards > MOST_SHARDS:
            raise InputError(f"{path}: num_prompts / shard_size is {self.num_shards}, expected at most {MOST_SHARDS}")
        return self


def _read_ids(path: Path, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise InputError(f"{path}: field 'end_token_ids' is {values!r}, expected a list of token ids")
    return tuple(values)


def _read_sampling(path: Path, values: Any) -> Sampling:
    expected = {field.name for field in fields(Sampling)}
    if isinstance(values, dict):
        values = {"min_p": 0.0, **values}  # traces are older than this setting
    if not isinstance(values, dict) or set(values) != expected:
        raise InputError(f"{path}: field 'sampling' is {values!r}, expected just {sorted(expected)}")
    if not all(type(value) in (int, float) and abs(value) < 1 << 31 for value in values.values()):
        raise InputError(f"{path}: field 'sampling' is {values!r}, expected numbers")
    if type(values["top_k"]) is not int:
        raise InputError(f"{path}: field 'sampling' has top_k {values['top_k']!r}, expected an integer")
    try:
        return Sampling(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def write_shard(folder: Path, shard: int, records: Sequence[dict[str, Any]]) -> None:
    """Write one shard atomically, with a checksum of all its bytes: it is there whole or not at all."""
    from datasets import Dataset

    alternatives = bool(records) and "alternative_ids" in records[0]
    dataset = Dataset.from_list(list(records), features=trace_features(alternatives=alternatives))
    with atomic_path(shard_path(folder, shard)) as temporary:
        dataset.to_parquet(temporary, write_page_checksum=True)
        seal_parquet(temporary)


def missing_shards(folder: Path, config: TraceConfig) -> list[int]:
    """Shards that are still to be collected."""
    return [shard for shard in range(config.num_shards) if not shard_path(folder, shard).exists()]


def check_shard(folder: Path, config: TraceConfig, shard: int) -> None:
    """Raises InputError naming a shard that is damaged, or not this one of these traces."""
    _read_table(folder, config, shard)


def read_traces(folder: Path) -> tuple[TraceConfig, Dataset]:
    """Read and validate a trace folder; records are in the order of the prompts.

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


def check_made_by(config: TraceConfig, folder: Path, *, draft_fingerprint: str) -> None:
    """Raises InputError when the traces were made with another draft than the one with this fingerprint."""
    if config.draft_fingerprint != draft_fingerprint:
        raise InputError(f"{folder}: made by another pair (its draft was {config.draft}); --draft must be that draft")


def check_coupled(config: TraceConfig, folder: Path) -> None:
    """Raises InputError when the responses are not what the target says under the sampling settings of these traces:
    no round of decoding would have gone along them."""
    if config.responses is not None and config.responses.startswith((IMPORTED, UNSCORED)):
        raise InputError(
            f"{folder}: was imported with `import-specdecpp`; its tokens were drawn without regard to the responses, "
            "so such traces can train a head, but neither be replayed nor be dev traces"
        )
    if config.responses is not None:
        raise InputError(
            f"{folder}: its responses were scored with `collect --responses`, not said under these sampling settings; "
            "such traces can train a head, but neither be replayed nor be dev traces"
        )


def check_scored(config: TraceConfig, folder: Path) -> None:
    """Raises InputError when the overlap is unknown, which heads that predict `next` or `both` are trained on."""
    if not config.scored:
        raise InputError(
            f"{folder}: was imported with `import-specdecpp --score false`, so its overlap is unknown: it can train "
            "heads that predict token only"
        )


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
        message = " ".join(str(error).split())[:160]
        raise InputError(
            f"{path}: damaged or not a trace shard ({message}); the same `accept-head collect` with --repair true "
            "makes it anew"
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
        if not pc.all(pc.equal(pc.list_value_length(table[name]), lengths)).as_py():
            raise InputError(f"{path}: column {name!r} is not as long as 'response_ids' in every record")
    for name in ALTERNATIVE_COLUMNS if config.alternatives is not None else ():
        if not pc.all(pc.equal(pc.list_value_length(table[name]), pc.multiply(lengths, config.alternatives))).as_py():
            raise InputError(f"{path}: column {name!r} is not {config.alternatives} times as long as 'response_ids'")
    unknown = () if config.scored else ("overlap", "target_logprob", "divergence")
    check_values(path, table, vocab_size=config.vocab_size, unknown=unknown)
    return table.replace_schema_metadata(schema.metadata)
