"""Checks of the options of `accept-head collect` before anything is loaded, and the config of its traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accept_head.alternatives import DRAWS
from accept_head.checkpoint import checkpoint_fingerprint, reads_target
from accept_head.errors import InputError
from accept_head.pair import Pair, context_tokens, end_ids, hub_revision, vocabulary_fingerprint
from accept_head.prompts import Prompt, prompts_fingerprint
from accept_head.sampling import Sampling
from accept_head.trace.config import CONFIG_NAME, MOST_ALTERNATIVES, MOST_DEPTHS, TraceConfig
from accept_head.training.respond.backends import Backend
from accept_head.training.respond.stored import StoredResponses

DEPTHS = 8  # of an EAGLE-3 drafter's traces


def check_positive(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}, expected a positive integer")


def checked_alternatives(alternatives: int | None, out: Path, sampling: Sampling) -> int:
    """The number of alternatives. When left out: the number in the traces that `out` already has, else DRAWS.

    Older traces have none, and the same command continues them without any.
    """
    if alternatives is None:
        if sampling.greedy:
            return 0
        return (TraceConfig.load(out).alternatives or 0) if (out / CONFIG_NAME).is_file() else DRAWS
    if not 0 <= alternatives <= MOST_ALTERNATIVES:
        raise InputError(f"alternatives is {alternatives}, expected 0 to {MOST_ALTERNATIVES}")
    if alternatives and sampling.greedy:
        raise InputError(f"alternatives is {alternatives}, but at temperature 0 the draft can draw one token only")
    return alternatives


def checked_depths(
    depths: int | None, draft: str, backend: Backend, responses: str | None, *, dry_run: bool
) -> int | None:
    """The number of depths for an EAGLE-3 drafter, None for a draft model. Raises InputError for what such a drafter
    cannot be used with."""
    if not reads_target(draft):
        if depths is not None:
            raise InputError(f"depths is {depths}, but --draft {draft} is no EAGLE-3 drafter; leave it out")
        return None
    if depths is not None and not 2 <= depths <= MOST_DEPTHS:
        raise InputError(f"depths is {depths}, expected 2 to {MOST_DEPTHS}")
    for option, given in (
        ("--backend", backend != "loop"),
        ("--responses", responses is not None),
        ("--dry_run", dry_run),
    ):
        if given:
            raise InputError(f"{option} does not work with an EAGLE-3 drafter yet (--draft {draft})")
    return depths or DEPTHS


def check_source(prompts: str | None, responses: str | None, backend: Backend, *, dry_run: bool) -> None:
    if (prompts is None) == (responses is None):
        given = "neither of them is" if prompts is None else "both are"
        raise InputError(f"one of --prompts and --responses says what to collect, but {given} given")
    if responses is not None and backend != "loop":
        raise InputError(f"--backend {backend} generates responses, but --responses has them already; leave one out")
    if responses is not None and dry_run:
        raise InputError("--dry_run estimates what --prompts cost; with --responses there is little to estimate")


def room_for_prompts(pair: Pair, max_new_tokens: int) -> int:
    """Length in tokens of the longest prompt that leaves room for a response."""
    context = min(context_tokens(pair.target), context_tokens(pair.draft))
    if context <= max_new_tokens:
        raise InputError(f"max_new_tokens is {max_new_tokens}, but the models' context has {context} tokens")
    return context - max_new_tokens


def trace_config(
    pair: Pair,
    names: tuple[str, str],
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    shard_size: int,
    alternatives: int,
    depths: int | None,
    backend: Backend,
    source: str | None,
    stored: StoredResponses | None,
) -> TraceConfig:
    """The config of the traces that these settings make.

    names: of target and draft. source: where the prompts were read from. stored: the responses, unless they are
    generated.
    """
    target, draft = names
    return TraceConfig(
        target=str(target),
        target_fingerprint=checkpoint_fingerprint(target),
        draft=str(draft),
        draft_fingerprint=checkpoint_fingerprint(draft),
        vocabulary_fingerprint=vocabulary_fingerprint(pair.tokenizer),
        prompts_fingerprint=prompts_fingerprint(prompts),
        vocab_size=pair.vocab_size,
        end_token_ids=tuple(end_ids(pair.target, pair.tokenizer)),
        num_prompts=len(prompts),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        shard_size=shard_size,
        responses=stored.config.fingerprint() if stored else None,
        target_revision=hub_revision(target),
        draft_revision=hub_revision(draft),
        dtype=str(pair.draft.dtype).removeprefix("torch."),
        dataset=source if source is not None and not Path(source).exists() else None,
        backend=None if stored else backend,
        alternatives=alternatives or None,
        depths=depths,
    )
