"""Where a head is: in a local folder, or on the Hub as `user/name` or `user/name@revision`.

All files of a head on the Hub are fetched at once, from one commit, into a folder of huggingface_hub's cache. A local
folder has precedence over a name on the Hub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from accept_head.errors import InputError
from accept_head.hub.errors import hub_errors

WEIGHTS_NAME, HEAD_CONFIG_NAME, TRAINING_NAME = "model.safetensors", "config.json", "training_config.json"
# All files that a head's folder may hold. No other file is ever fetched or sent.
HEAD_FILES = (
    WEIGHTS_NAME,
    HEAD_CONFIG_NAME,
    "decoding.json",
    "calibration.json",
    "trace_config.json",
    "metrics.json",
    TRAINING_NAME,
)
HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def head_folder(name: str | Path, *, revision: str | None = None, **download: Any) -> Path:
    """The folder of a head, fetched from the Hub if necessary.

    revision: may be given here or in the name. download: cache_dir, token, local_files_only, force_download of
    `huggingface_hub.snapshot_download`.

    Raises InputError when there is no such head: no folder, no repository, no revision, no access, no network.
    """
    folder = Path(name)
    try:
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except OSError as error:  # for example, a name that is too long
        raise InputError(f"{str(name)[:80]}: not a head folder ({error.strerror})") from None
    if is_folder:
        if not (folder / HEAD_CONFIG_NAME).is_file():
            raise InputError(f"{folder}: no {HEAD_CONFIG_NAME} in it, so it is not a head")
        return folder
    if is_file:
        raise InputError(f"{folder}: not a head folder")
    hub = HUB_NAME.fullmatch(str(name))
    if hub is None:
        raise InputError(f"{name}: no such folder, nor a name on the Hub, user/name or user/name@revision")
    if revision is not None and hub["revision"] not in (None, revision):
        raise InputError(f"{name}: the revision is also given as {revision!r}")
    repo, revision = hub["repo"], revision or hub["revision"]
    shown = f"{repo}@{revision}" if revision else repo
    with hub_errors(f"{shown}: no such folder, and from the Hub"):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(HEAD_FILES), **download))
    for file in (HEAD_CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / file).is_file():
            raise InputError(f"{shown}: the repository has no {file}, so it is not a head")
    return folder
