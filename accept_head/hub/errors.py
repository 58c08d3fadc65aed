"""Errors of the Hub as one sentence: what went wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from accept_head.errors import InputError, one_line

LOG_IN = "log in with `hf auth login`"


@contextmanager
def hub_errors(what: str, *, otherwise: str = "") -> Iterator[None]:
    """Raise errors of the Hub, or of the connection to it, as an InputError that begins with `what`.

    otherwise: text to add when the connection failed.
    """
    try:
        yield
    except InputError:
        raise
    # huggingface_hub raises ValueError for wrong names and metadata. Its uploads wrap the real error in RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{what}: {_reason(error, otherwise)}") from None


def _reason(error: BaseException, otherwise: str) -> str:
    chain = list(_causes(error))
    if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
        return "it is not in the local cache, and offline mode (HF_HUB_OFFLINE) forbids to look for it"
    for each in chain:
        if isinstance(each, HfHubHTTPError):
            return _refusal(each)
    for each in chain:
        if isinstance(each, HTTPError | ConnectionError | TimeoutError):
            return f"the connection to {constants.ENDPOINT} failed ({one_line(each)}){otherwise}"
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is None:
        return "it is not in the local cache, and the Hub could not be reached"
    return one_line(chain[-1])


def _refusal(error: HfHubHTTPError) -> str:
    code = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"access to it is gated ({code}): ask for it on its page on the Hub, and {LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision (404)"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"the repository has no such file ({error.response.url})"
    if code == 401:
        return f"the Hub does not know you, or has no such repository (401): {LOG_IN}, and check the name"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub has no such repository, or it is private and not yours (404): check the name, and {LOG_IN}"
    said = f" ({' '.join(error.server_message.split())[:160]})" if error.server_message else ""
    if code == 403:
        return f"the Hub refuses it (403){said}: your token must be allowed to do this"
    if code == 429:
        return f"the Hub's limit on requests is reached (429){said}: try again later"
    return f"the Hub answered {code}{said or f' ({one_line(error)})'}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
