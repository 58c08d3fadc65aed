"""Target responses by any OpenAI-compatible completions endpoint that takes and returns token ids, such as vLLM's.

Many requests are in flight at a time. When the server is busy or fails, a request is tried again after growing delays.
The last failure, or a refusal, ends the run with a one-line error. Finished shards are kept.
"""

from __future__ import annotations

import email.utils
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import httpx2

from accept_head.errors import InputError
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.respond.request import EngineRequest
from accept_head.training.respond.responder import Batch, answered

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds
LONGEST_RETRY_AFTER = 600.0
TIMEOUT = httpx2.Timeout(600.0, connect=10.0)
KEY = "OPENAI_API_KEY"


def check_endpoint(endpoint: str | None, concurrency: int | None, retries: int | None) -> None:
    """Raises InputError naming the option that is missing or wrong."""
    if endpoint is None:
        raise InputError("--backend openai needs --endpoint, the server's address, like http://127.0.0.1:8000/v1")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(f"--endpoint {endpoint}: expected an address like http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise InputError(f"--endpoint has credentials in it; give the key in the environment variable {KEY}")
    if concurrency is not None and concurrency < 1:
        raise InputError(f"concurrency is {concurrency}, expected a positive integer")
    if retries is not None and retries < 0:
        raise InputError(f"retries is {retries}, expected an integer >= 0")


class ServerResponder:
    """Gets responses from a server.

    endpoint: with or without /completions at its end. served_name: the model's name there. concurrency: requests in
    flight. retries: attempts of one request after the first.
    """

    def __init__(
        self,
        pair: Pair,
        config: TraceConfig,
        *,
        endpoint: str,
        served_name: str | None = None,
        concurrency: int = 32,
        retries: int = 8,
    ):
        self.request = EngineRequest.of(pair, config)
        self.batch_size, self.drawn_with = config.batch_size, config.sampling
        self.url = f"{endpoint.rstrip('/').removesuffix('/completions')}/completions"
        self.model = served_name or config.target
        self.concurrency, self.retries = concurrency, retries
        self.failed = threading.Event()  # set by the first request that gives up; the others stop waiting
        self.lock = threading.Lock()
        self.error: BaseException | None = None  # the first error
        key = os.environ.get(KEY)
        self.client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT,
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        workers = ThreadPoolExecutor(self.concurrency, thread_name_prefix="respond")
        answers = [workers.submit(self._respond_or_stop, prompt) for prompt in prompts]
        try:
            wait(answers, return_when=FIRST_EXCEPTION)
            if self.error is not None:
                raise self.error
            said = [answer.result() for answer in answers]
        except BaseException:
            self.failed.set()
            raise
        finally:
            workers.shutdown(cancel_futures=True)
        yield from answered(prompts, said, self.batch_size)

    def _respond_or_stop(self, prompt: Prompt) -> list[int]:
        """Call `respond`, unless another request has failed."""
        if self.failed.is_set():
            raise CancelledError
        try:
            return self.respond(prompt)
        except BaseException as error:
            with self.lock:
                self.error = self.error or error
            self.failed.set()
            raise

    def respond(self, prompt: Prompt) -> list[int]:
        """The response to one prompt. Raises InputError when the server refuses it, or the last attempt fails."""
        body = {
            "model": self.model,
            "prompt": list(prompt.ids),
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            **self.request.fields(prompt.index),
        }
        choice = self._choice(self._post(body))
        given = choice.get("prompt_token_ids")
        if given is not None and given != list(prompt.ids):
            raise InputError(f"--endpoint {self.url}: prompt {prompt.index} reached the model with other token ids")
        if not isinstance(choice.get("token_ids"), list):
            raise InputError(
                f"--endpoint {self.url}: it returns no token_ids, which traces need; vLLM's server does, for "
                "`return_token_ids` in the request"
            )
        return self.request.checked(choice["token_ids"], prompt.index, f"--endpoint {self.url}")

    def _choice(self, answer: Any) -> dict[str, Any]:
        match answer:
            case {"choices": [dict(choice)]}:
                return choice
        raise InputError(f"--endpoint {self.url}: its answer is no completion with one choice")

    def _post(self, body: dict[str, Any]) -> Any:
        """The JSON of the server's answer, with retries."""
        for attempt in range(self.retries + 1):
            wanted = None  # seconds that the server asks us to wait
            try:
                response = self.client.post(self.url, json=body)
                if response.status_code == 200:
                    return response.json()
                trouble = f"HTTP {response.status_code}: {_message(response)}"
                if response.status_code not in BUSY:
                    raise InputError(f"--endpoint {self.url}: {trouble}")
                wanted = retry_after(response.headers.get("Retry-After"))
            except (httpx2.TransportError, ValueError) as error:  # not reached, cut off, or no JSON
                if isinstance(error, InputError):
                    raise
                trouble = f"{type(error).__name__}: {_one_line(str(error))}"
            if attempt < self.retries and self.failed.wait(delay(attempt, wanted)):
                break
        raise InputError(
            f"--endpoint {self.url}: gave up after {self.retries + 1} attempts ({trouble}); finished shards are kept, "
            "so the same command goes on from there"
        )

    def close(self) -> None:
        self.client.close()


def delay(attempt: int, wanted: float | None) -> float:
    """Seconds before the next attempt: a random share, at least half, of a span that doubles with each attempt.

    When the server asks for `wanted` seconds: these and a random share, at most half, of the span. So many clients do
    not come back at the same time.
    """
    span = min(LONGEST_DELAY, FIRST_DELAY * 2**attempt)
    jittered = span * random.uniform(0.5, 1.0)
    return jittered if wanted is None else wanted + jittered - span / 2


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date. None when missing or unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if seconds == seconds else None


def _message(response: Any) -> str:
    """The server's error message on one line."""
    try:
        answer = response.json()
        error = answer.get("error", answer)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return _one_line(str(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
