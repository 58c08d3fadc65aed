"""Single rounds of a policy on coupled traces, token by token, for the report's viewer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import round_starts
from accept_head.inference.report.data import ViewedResponse, ViewedRound, ViewedToken


def view_responses(
    traces: CoupledTraces,
    responses: Sequence[int],
    policy: str,
    lengths: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    predicted: Tensor | None = None,
) -> list[ViewedResponse]:
    """Every round of some responses.

    lengths: (P,), tokens that a round from each position drafts. predicted: (M,), P̂ of each token, if the policy
    predicts.
    """
    starts = round_starts(traces, lengths)
    viewed = []
    for number in responses:
        record = traces.traces[number]
        first, length = int(traces.starts[number]), int(traces.lengths[number])
        mine = starts[(starts >= first) & (starts < first + length)].tolist()
        text = Pieces(tokenizer, [*record["prompt_ids"], *record["response_ids"]], len(record["prompt_ids"]))
        rounds = [_round(traces, record, text, start, first, int(lengths[start]), predicted) for start in mine]
        prompt = text.text(record["prompt_ids"])
        viewed.append(ViewedResponse(prompt=prompt, domain=record["domain"], policy=policy, rounds=rounds))
    return viewed


class Pieces:
    """The text of single tokens: what each token adds to the one before it, so that spaces are kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: int):
        self.tokenizer, self.ids, self.prompt = tokenizer, ids, prompt

    def at(self, step: int, token: int, before: int | None = None) -> str:
        """The text of a token at a step of the response, after the token `before` or the response's previous token."""
        before = self.ids[self.prompt + step - 1] if before is None else before
        both, one = self.text([before, token]), self.text([before])
        return both[len(one) :] if both.startswith(one) else self.text([token])

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _round(
    traces: CoupledTraces,
    record: dict,
    text: Pieces,
    start: int,
    first: int,
    drafted: int,
    predicted: Tensor | None,
) -> ViewedRound:
    path = traces.path[start, :drafted].tolist()
    accepted = min(drafted, int(traces.leading[start]))
    step, before, survival = start - first, None, 1.0
    tokens = []
    for depth, token in enumerate(path):
        chance = None if predicted is None else float(predicted[token])
        survival *= chance if chance is not None else 1.0
        tokens.append(
            ViewedToken(
                text=text.at(step + depth, int(traces.ids[token]), before),
                predicted=chance,
                survival=None if chance is None else survival,
                # The traces have no target distribution after a rejection.
                acceptance=record["acceptance"][token - first * traces.depths] if depth <= accepted else None,
                draft_probability=float(traces.logprob[token].exp()),
                entropy=float(traces.entropy[token]),
                status="accepted" if depth < accepted else "rejected" if depth == accepted else "discarded",
            )
        )
        before = int(traces.ids[token])
    emitted = step + accepted
    if emitted >= len(record["response_ids"]):  # the draft's end token was accepted
        return ViewedRound(drafted=tokens, emitted="", kind="end")
    piece = text.at(emitted, record["response_ids"][emitted])
    return ViewedRound(drafted=tokens, emitted=piece, kind="redrawn" if accepted < drafted else "bonus")
