"""The function that `custom_generate/generate.py` of a published head calls, for

    model.generate(**inputs, custom_generate="user/name", trust_remote_code=True, draft=draft_model)

transformers passes on all arguments of `generate` unchanged. They go through its own preparation a second time, with
our decode loop as the decoding method.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedModel

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.hub.folder import head_folder
from accept_head.inference.adapters.transformers import generate
from accept_head.inference.policies.saved_head import head_policy
from accept_head.inference.policies.spec import DraftShape
from accept_head.inference.policy import DraftPolicy
from accept_head.trace.config import CONFIG_NAME

# Arguments for fetching the code, which transformers leaves in; the head is fetched with the same ones.
FETCHING = ("token", "cache_dir", "local_files_only", "force_download")


def generate_with_head(
    model: PreTrainedModel,
    repo: str,
    commit: str,
    *,
    draft: PreTrainedModel | None = None,
    assistant_model: PreTrainedModel | None = None,
    policy: DraftPolicy | str | None = None,
    streamer: Any = None,
    **arguments: Any,
) -> Any:
    """`model.generate` with the head of this repository at this commit.

    draft, assistant_model: the draft, by either name. policy: replaces the head with its tuned threshold. The other
    arguments and the result are those of `generate`. Raises InputError (a ValueError) for unsupported arguments.
    """
    if streamer is not None:
        raise InputError("streamer is given: transformers does not hand one on to a custom decoding method")
    revision = arguments.pop("revision", None)
    # The commit comes from the path of the cached code. If it is not a commit hash, use the given revision.
    revision = commit if re.fullmatch(r"[0-9a-f]{40}", commit) else revision
    fetching = {name: arguments.pop(name) for name in FETCHING if name in arguments}
    draft = draft if draft is not None else assistant_model
    if draft is None or policy is None:
        folder = head_folder(repo, revision=revision, **fetching)
        if draft is None:
            path = folder / CONFIG_NAME
            recorded = read_json(path).get("draft") if path.is_file() else None
            raise InputError(f"no draft model: pass draft=..., loaded from {recorded or 'what the head belongs to'}")
        policy = head_policy(repo, DraftShape.of(draft), None, {}, folder)
    own: Any = type(model)  # not an instance's `generate`, which may be another repository's custom one
    return own.generate(model, **arguments, custom_generate=generate, draft=draft, policy=policy)
