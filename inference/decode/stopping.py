"""What ends a response: an end token, a stop string, or any of transformers' stopping criteria.

A round can add several tokens. The criteria are checked after each of them, so a response ends where it would end in
autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from accept_head.errors import InputError

# The time to prepare the criterion grows with the vocabulary and with both of these.
MOST_STRINGS, LONGEST_STRING = 16, 256


class Stopping:
    """end_ids: tokens that end a response. criteria: transformers' own, called with (1, length) ids and no scores."""

    def __init__(self, end_ids: Sequence[int], criteria: Sequence[StoppingCriteria], device: torch.device):
        self.end_ids = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        self.criteria: list[Any] = list(criteria)

    def holds(self, context: Tensor) -> bool:
        """Whether any criterion stops after these tokens, (length,)."""
        return any(bool(criterion(context[None], None).all()) for criterion in self.criteria)


def stop_strings_criteria(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[StoppingCriteria]:
    """transformers' criterion for stop strings; empty without strings. Raises InputError when a string is empty, when
    there are too many or too long ones, or when there is no tokenizer."""
    if not strings:
        return []
    if tokenizer is None:
        raise InputError("stop strings need a tokenizer: pass tokenizer=...")
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop strings are {list(strings)}, expected texts that are not empty")
    if len(strings) > MOST_STRINGS or max(map(len, strings)) > LONGEST_STRING:
        raise InputError(
            f"there are {len(strings)} stop strings of up to {max(map(len, strings))} characters, expected at most "
            f"{MOST_STRINGS} of {LONGEST_STRING}"
        )
    return [StopStringCriteria(tokenizer, list(strings))]
