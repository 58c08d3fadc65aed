"""`accept-head publish`: a head's folder → a repository on the Hub, in one commit.

With a single commit, an interrupted upload leaves the last revision unchanged, and readers never see half of a new one.
The Hub keeps the parts that arrived, and they are not sent again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from accept_head.calibration import DepthCalibration
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.hub.card import CardFacts, base_models, model_card
from accept_head.hub.errors import hub_errors
from accept_head.hub.folder import HEAD_FILES, HUB_NAME, WEIGHTS_NAME, head_folder
from accept_head.hub.stored import read_stored
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.version import VERSION

# transformers runs this for `model.generate(custom_generate=REPOSITORY, trust_remote_code=True, …)`.
CUSTOM_GENERATE = '''"""Speculative decoding with the head of this repository, see its README. Needs accept-head.

    model.generate(**inputs, custom_generate={repo!r}, trust_remote_code=True, draft=draft_model)
"""

from pathlib import Path

from accept_head.inference.adapters.custom_generate import generate_with_head


def generate(model, **arguments):
    # transformers keeps this file in a folder named after the commit that it is of: so is the head to be.
    commit = Path(__file__).resolve().parents[1].name
    return generate_with_head(model, {repo!r}, commit, **arguments)
'''
MADE_FILES = {
    "README.md": "",
    "custom_generate/generate.py": CUSTOM_GENERATE,
    "custom_generate/requirements.txt": "accept-head>={version}\n",
}


def publish(
    head: str,
    repo: str,
    revision: str = "main",
    private: bool = False,
    message: str | None = None,
    datasets: list[str] | None = None,
    license: str | None = None,
) -> None:
    """Publish a head on the Hub, in one commit: `accept-head publish HEAD_FOLDER user/name`.

    The repository holds the weights, config, tuned threshold, what the head was trained on and its metrics, a model
    card, and code with which transformers uses it. Log in first, with `hf auth login`, or set HF_TOKEN. A command that
    was interrupted can be run again; what has arrived is not sent twice.

    Args:
        head: Folder of the head.
        repo: Repository, user/name; it is made when it is not there.
        revision: Branch to commit to; it is made when it is not there.
        private: Make the repository private, when it is made.
        message: Of the commit.
        datasets: Data sets of the prompts, by their names on the Hub, for the card; those that were collected from are
            named anyway.
        license: Of the head, as the Hub names it, like apache-2.0, for the card.
    """
    folder = Path(head)
    if not folder.is_dir():
        raise InputError(f"--head {head}: no such folder")
    address = push_folder(
        folder, repo, revision=revision, private=private or None, message=message, datasets=datasets, license=license
    )
    traces = _traces(folder)
    if not base_models(traces):
        why = "it has no trace_config.json" if traces is None else "target and draft were local folders"
        print(f"The card names no base_model: {why}.")
    if not (folder / "decoding.json").is_file():
        print("It has no tuned threshold: users must give one. `accept-head tune` writes decoding.json.")
    print(f"published {folder}: {address}")
    print(f"use it with --policy head:{repo}{'' if revision == 'main' else f'@{revision}'}")


def push_folder(
    folder: Path,
    repo: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    message: str | None = None,
    datasets: Sequence[str] | None = None,
    license: str | None = None,
    token: str | None = None,
) -> str:
    """Make the repository and the branch if necessary, and commit the whole head.

    Returns the commit's address, or the last commit's when nothing has changed.

    Raises InputError, and sends nothing, when the folder does not hold a whole head. Also raises InputError when the
    Hub refuses or cannot be reached; then the branch is unchanged.
    """
    if (found := HUB_NAME.fullmatch(repo)) is None or found["revision"]:
        raise InputError(f"--repo {repo}: expected user/name")
    branch = revision or "main"
    files = artefact(folder, repo, datasets or (), license)
    api = HfApi(token=token, library_name="accept-head", library_version=VERSION)
    again = "; the branch is as it was: run this again, what has arrived is not sent twice"
    with hub_errors(f"publishing to {repo}", otherwise=again):
        api.create_repo(repo, private=private, exist_ok=True)
        if branch != "main":
            api.create_branch(repo, branch=branch, exist_ok=True)
        # Delete files of the last head that this head lacks, such as a threshold.
        there = api.list_repo_files(repo, revision=branch)
        stale = [name for name in there if name in {*HEAD_FILES, *MADE_FILES} - files.keys()]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()),
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
            ],
            commit_message=message or f"Acceptance prediction head, by accept-head {VERSION}",
            revision=branch,
        )
    return commit.commit_url


def artefact(folder: Path, repo: str, datasets: Sequence[str] = (), license: str | None = None) -> dict[str, Any]:
    """All files of the repository: name → content, or the path of a large file. The same folder gives the same bytes.

    Raises InputError naming a file of the folder that is invalid.
    """
    config, _ = read_stored(head_folder(folder))
    traces = _traces(folder)
    values = {name: read_json(folder / name) for name in HEAD_FILES[1:] if (folder / name).is_file()}
    if "calibration.json" in values:
        DepthCalibration.load(folder)
    collected = [traces.dataset] if traces is not None and traces.dataset else []
    facts = CardFacts(
        config=config,
        traces=traces and _shareable_traces(traces),
        metrics=values.get("metrics.json"),
        decoding=values.get("decoding.json"),
        repo=repo,
        datasets=list(dict.fromkeys([*collected, *datasets])),
        license=license,
    )
    with hub_errors(f"{folder}: the model card"):  # ValueError for invalid metadata
        card = str(model_card(facts))
    made = {name: text.format(repo=repo, version=VERSION).encode() for name, text in MADE_FILES.items()}
    return {
        **made,
        "README.md": card.encode(),
        **{name: _shared_bytes(folder / name, value) for name, value in values.items()},
        WEIGHTS_NAME: folder / WEIGHTS_NAME,
    }


def _traces(folder: Path) -> TraceConfig | None:
    return TraceConfig.load(folder) if (folder / CONFIG_NAME).is_file() else None


def _shareable_traces(traces: TraceConfig) -> TraceConfig:
    return replace(traces, target=_shareable(traces.target), draft=_shareable(traces.draft))


def _shared_bytes(path: Path, value: dict[str, Any]) -> bytes:
    """The content of the file, without paths of this machine."""
    shared = _shareable(value)
    return path.read_bytes() if shared == value else (json.dumps(shared, indent=2, ensure_ascii=False) + "\n").encode()


def _shareable(value: Any) -> Any:
    """The value with absolute paths cut to their last part, because the rest is private. Fingerprints ignore names."""
    if isinstance(value, dict):
        return {key: _shareable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shareable(each) for each in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value
