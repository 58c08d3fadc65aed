"""How a folder of traces was made (its `trace_config.json`), and what the traces may be used for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from accept_head.errors import InputError
from accept_head.files import read_json, sha256, write_json
from accept_head.sampling import Sampling

TRACE_VERSION = 2
CONFIG_NAME = "trace_config.json"
MOST_SHARDS = 100_000
MOST_ALTERNATIVES = 1024
MOST_DEPTHS = 64
ORIGINS = ("target", "draft", "target_revision", "draft_revision", "dtype", "dataset")
# Fields that older traces lack.
LATER = ("responses", "target_revision", "draft_revision", "dtype", "dataset", "backend", "alternatives", "depths")
IMPORTED, UNSCORED = "specdecpp:", "specdecpp-unscored:"  # beginning of `responses` in imported traces


def fingerprint_of(written: Mapping[str, Any]) -> str:
    """TraceConfig.fingerprint of the content of a trace_config.json."""
    content = {key: value for key, value in written.items() if key not in ORIGINS}
    return sha256(json.dumps(content, sort_keys=True))


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """How a folder of traces was made. Two runs with equal configs write the same records.

    target, draft: name and fingerprint. vocabulary: fingerprint of the tokenizer. prompts: SHA-256 of the prompts used.
    vocab_size: number of ids that both models score. end_token_ids: ids that end a response.
    num_prompts: records in the folder. shard_size: records per shard. batch_size: prompts generated together.
    responses: None when the target generated the responses under these settings. For `collect --responses`: the
        fingerprint of the traces that the scored responses were taken from. For `import-specdecpp`: IMPORTED or
        UNSCORED, then the SHA-256 of the data. See `check_coupled`, `check_scored`.
    target_revision, draft_revision: commits of models that came from the Hub. dtype: of the draft, when it was loaded.
    dataset: name of the data set that the prompts were read from.
    backend: what generated the responses; None in older traces, made with transformers' generate, and for `responses`.
        Each backend has its own random numbers.
    alternatives: further draws of the draft at each position; None when there are none.
    depths: of a drafter that reads the target's states, whose distribution at a position depends on where the round
        began: depth d is of the round that began d − 1 positions before. None for a draft model.
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
    depths: int | None = None

    @property
    def scored(self) -> bool:
        """Whether overlap, target_logprob and divergence are known, which need a target forward. NaN if not."""
        return self.responses is None or not self.responses.startswith(UNSCORED)

    @property
    def num_shards(self) -> int:
        return -(-self.num_prompts // self.shard_size)

    def shard_rows(self, shard: int) -> int:
        return min(self.shard_size, self.num_prompts - shard * self.shard_size)

    def content(self) -> dict[str, Any]:
        """The fields that decide the records: all except ORIGINS, which change when a folder moves."""
        return {key: value for key, value in self._written().items() if key not in ORIGINS}

    def fingerprint(self) -> str:
        """SHA-256 of `content`."""
        return fingerprint_of(self._written())

    def save(self, folder: Path) -> None:
        write_json(folder / CONFIG_NAME, self._written())

    def _written(self) -> dict[str, Any]:
        """The fields to write. Fields of LATER that are None are left out, so older traces keep their fingerprint."""
        return {key: value for key, value in asdict(self).items() if key not in LATER or value is not None}

    @classmethod
    def load(cls, folder: Path) -> TraceConfig:
        """Read a folder's config. Raises InputError naming a file or field that is missing or of another version."""
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
        if self.depths is not None and not (type(self.depths) is int and 2 <= self.depths <= MOST_DEPTHS):
            raise InputError(f"{path}: field 'depths' is {self.depths!r}, expected 2 to {MOST_DEPTHS}")
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
        values = {"min_p": 0.0, **values}  # older traces lack this setting
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


def check_made_by(config: TraceConfig, folder: Path, *, draft_fingerprint: str) -> None:
    """Raises InputError when the traces were made with another draft than the one with this fingerprint."""
    if config.draft_fingerprint != draft_fingerprint:
        raise InputError(f"{folder}: made by another pair (its draft was {config.draft}); --draft must be that draft")


def check_coupled(config: TraceConfig, folder: Path) -> None:
    """Raises InputError when the target did not generate the responses under the sampling settings of these traces.

    Decoding would not have produced such responses, so replaying them means nothing.
    """
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
    """Raises InputError when the overlap is unknown. It is the label of heads that predict `next` or `both`."""
    if not config.scored:
        raise InputError(
            f"{folder}: was imported with `import-specdecpp --score false`, so its overlap is unknown: it can train "
            "heads that predict token only"
        )
