"""A local completions endpoint that returns token ids, and can fail in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], list[int]]


class CompletionsServer(ThreadingHTTPServer):
    """answer: request body → token ids. failures: how the next requests fail, one each. bodies: those answered.
    requests: all of them, with their headers."""

    daemon_threads = True

    def __init__(self, answer: Answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lock = answer, threading.Lock()
        self.failures: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.most_at_once = self.at_once = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up


class Handler(BaseHTTPRequestHandler):
    server: CompletionsServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((dict(self.headers), body))
            failure = self.server.failures.pop(0) if self.server.failures else None
        self.fail(failure) if failure is not None else self.succeed(body)

    def succeed(self, body: dict[str, Any]) -> None:
        assert self.path == "/v1/completions", self.path
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        ids = self.server.answer(body)
        with self.server.lock:  # before the answer is sent: the client may ask again as soon as it has come
            self.server.at_once -= 1
            self.server.bodies.append(body)
        choice = {"index": 0, "text": "", "token_ids": ids, "prompt_token_ids": body["prompt"]}
        self.send(200, {"object": "text_completion", "model": body["model"], "choices": [choice]})

    def fail(self, failure: Any) -> None:
        """failure: an HTTP status, (status, headers), a body that is sent with status 200, or `drop` or `cut`."""
        if failure == "drop":
            self.close_connection = True
        elif failure == "cut":
            self.send(200, b'{"choices": [{"token_', claimed=1000)
            self.close_connection = True
        elif isinstance(failure, dict | bytes):
            self.send(200, failure)
        else:
            status, headers = failure if isinstance(failure, tuple) else (failure, {})
            self.send(status, {"error": {"message": f"no luck: {status}", "code": status}}, headers)

    def send(
        self, status: int, content: Any, headers: dict[str, str] | None = None, claimed: int | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(claimed or len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[CompletionsServer]:
    with CompletionsServer(answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
