"""Requests to engines other than our loop, and checks of their answers, so that all backends draw alike.

vLLM's SamplingParams and the completions endpoint of its server have these fields under the same names. Every field is
sent, so that no default of the engine applies, such as a repetition penalty from the model's generation_config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accept_head.errors import InputError
from accept_head.files import sha256
from accept_head.pair import Pair, output_size
from accept_head.sampling import Sampling
from accept_head.trace.config import TraceConfig
from accept_head.training.respond.responder import until_end

SUPPRESSED = -100.0  # the lowest logit bias that an OpenAI-compatible endpoint takes
MOST_EXCLUDED = 0.1  # largest share of a shard's tokens that our forward may exclude by rounding (ties, edge of top-k)


@dataclass(frozen=True)
class EngineRequest:
    """Settings of all requests.

    end_ids: ids that end a response. vocab_size: number of ids that may be generated. outputs: number of ids that the
    target scores.
    """

    sampling: Sampling
    max_new_tokens: int
    seed: int
    end_ids: tuple[int, ...]
    vocab_size: int
    outputs: int

    @classmethod
    def of(cls, pair: Pair, config: TraceConfig) -> EngineRequest:
        check_sampling(config.sampling)
        return cls(
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            end_ids=config.end_token_ids,
            vocab_size=config.vocab_size,
            outputs=output_size(pair.target),
        )

    def fields(self, index: int) -> dict[str, Any]:
        """The fields of the request for the prompt with this index."""
        sampling = self.sampling
        fields: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request_seed(self.seed, index),
            "ignore_eos": True,  # only end_ids end a response
            "stop_token_ids": list(self.end_ids),
        }
        if self.outputs > self.vocab_size:
            fields["logit_bias"] = {str(token): SUPPRESSED for token in range(self.vocab_size, self.outputs)}
        return fields

    def checked(self, ids: Sequence[int], index: int, engine: str) -> list[int]:
        """The response up to its first end token. Raises InputError when this pair cannot have generated it."""
        response = until_end(list(ids), self.end_ids)
        if not response or len(response) > self.max_new_tokens:
            raise InputError(
                f"{engine}: {len(response)} tokens came for prompt {index}, expected 1 to {self.max_new_tokens}"
            )
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in response):
            raise InputError(
                f"{engine}: its response to prompt {index} has ids outside the {self.vocab_size} of this pair; is it "
                "another model?"
            )
        return response


def request_seed(seed: int, index: int) -> int:
    """The seed of one request, so that a response does not depend on the other requests in flight.

    It has 53 bits, which any JSON reader keeps.
    """
    return int(sha256(f"response {seed} {index}")[:16], 16) >> 11


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError for settings that transformers and vLLM understand differently."""
    if not sampling.greedy and sampling.min_p > 0 and sampling.top_p < 1:
        raise InputError(
            "min_p and top_p are both given: vLLM applies min_p first and transformers top_p first, which is not the "
            "same distribution; give one of them, or use --backend loop"
        )


def check_said_by_target(records: Sequence[dict[str, Any]], engine: str) -> None:
    """Raises InputError when the target would not have generated the engine's responses.

    A token that our forward excludes under the sampling settings has the lowest log-probability. The check sees nothing
    when the settings exclude no token (top_k 0, top_p 1, temperature above 0).
    """
    logprobs = [value for record in records for value in record["target_logprob"]]
    excluded = sum(value < -80 for value in logprobs)
    if excluded > max(20, MOST_EXCLUDED * len(logprobs)):
        raise InputError(
            f"{engine}: {excluded} of {len(logprobs)} tokens have probability 0 under --target and these sampling "
            "settings; it seems to run another model, or the same one quantized"
        )
