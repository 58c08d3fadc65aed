"""The prompts that are decoded while costs are measured."""

from __future__ import annotations

from collections.abc import Sequence

from accept_head.errors import InputError
from accept_head.pair import Pair, context_tokens
from accept_head.prompts import load_prompts

PROMPTS = 16  # prompts to read from a file or data set
# Used when no prompts are given. Costs depend on lengths and hardly on words.
TEXTS = (
    "Speculative decoding lets a small draft model propose several tokens, which a large target verifies in one pass.",
    "Accepted tokens are kept, the first rejected one is drawn again, and the output keeps the target's distribution.",
    "How many tokens to propose is a guess, and the best guess changes from word to word, and from text to text.",
    "def cost(drafts, targets, t_draft, t_target):\n    return drafts * t_draft + targets * t_target\n",
)


def read_prompts(pair: Pair, prompts: str | None, field: str, max_prompts: int | None) -> list[Sequence[int]]:
    """Token ids of prompts from a file or data set, or of the built-in texts."""
    if not prompts:
        return [tuple(pair.tokenizer(text)["input_ids"]) for text in TEXTS]
    most = PROMPTS if max_prompts is None else max_prompts
    return [prompt.ids for prompt in load_prompts(prompts, pair.tokenizer, field=field, max_prompts=most)]


def usable_prompts(pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Sequence[int]]:
    """The prompts that leave room for `new_tokens` more tokens. Raises InputError when there are none."""
    room = min(context_tokens(pair.target), context_tokens(pair.draft)) - new_tokens
    usable = [prompt for prompt in prompts if len(prompt) <= room]
    if not usable:
        raise InputError(f"no prompt leaves room for {new_tokens} more tokens in the models' context")
    return usable
