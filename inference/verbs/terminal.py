"""What a person at a terminal sees while responses are made: the text itself, or progress, with the rates so far."""

from __future__ import annotations

import sys
import time

from transformers import PreTrainedTokenizerBase

from accept_head.console import Progress, make_console
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished

# What the draft proposed and the target accepted is green; the target's own tokens are plain.
ACCEPTED_STYLE, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Terminal:
    """Streams the text when rows are decoded one by one, else shows progress.

    wanted: False shows nothing; None streams text only when stdout is a terminal.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, total: int, *, one_row: bool, wanted: bool | None):
        self.text = one_row and (sys.stdout.isatty() if wanted is None else wanted)
        self.tokenizer, self.total, self.hidden = tokenizer, total, wanted is False or self.text
        self.console = make_console(highlight=False)
        self.printed = ""
        self.pending: list[tuple[list[int], str | None]] = []
        self.generated = self.drafted = self.accepted = 0

    def __enter__(self) -> Terminal:
        self.begin = time.perf_counter()
        self.progress = Progress(total=self.total, desc="decode", unit="response", disable=self.hidden)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.close()

    def watch(self, round_: Round) -> None:
        """Called after every round. Shows the round before: the last one may yet be cut by a stop string."""
        if not self.text:
            return
        rows = round_.rows
        request = rows.requests[0]
        assert request is not None
        self._show(self.pending)
        before = rows.host_lengths[0] - len(request.prompt)
        new = rows.tokens[0, len(request.prompt) : int(rows.lengths[0])].tolist()
        self.pending = [(new[: before + int(round_.outcome.accepted[0])], ACCEPTED_STYLE), (new, None)]

    def _show(self, parts: list[tuple[list[int], str | None]]) -> None:
        """Print what each list of tokens adds to the text so far, in its style."""
        for token_ids, style in parts:
            text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
            # Half a character waits for its other half.
            if text.startswith(self.printed) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._write(text[len(self.printed) :], style)
                self.printed = text

    def _write(self, text: str, style: str | None) -> None:
        """To the terminal as it is: rich would expand tabs and wrap lines."""
        if style and self.console.color_system:
            text = f"{style}{text}{PLAIN}"
        self.console.file.write(text)
        self.console.file.flush()

    def finished(self, done: Finished) -> None:
        """Called after every response."""
        self.generated += done.stats.generated
        self.drafted += done.stats.drafted
        self.accepted += done.stats.accepted
        rates = f"{self.generated / (time.perf_counter() - self.begin):.0f} tokens/s"
        if self.drafted:
            rates += f", {self.accepted} of {self.drafted} drafted tokens accepted"
        if self.text:
            self._show([(ids[: len(done.token_ids)], style) for ids, style in self.pending])
            self._show([(done.token_ids, None)])
            self.printed, self.pending = "", []
            self._write(f"\n[{rates}]\n\n", DIM)
        else:
            self.progress.set_postfix_str(rates, refresh=False)
            self.progress.update(1)
