"""What a report shows of single rounds: the text as it was drafted, and how well the predictions held at each depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from accept_head.calibration import expected_calibration_error
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import round_starts
from accept_head.inference.report.data import CalibrationCurve, ViewedResponse, ViewedRound, ViewedToken

DEPTHS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, None))
BINS = 10


def view_responses(
    traces: CoupledTraces,
    responses: Sequence[int],
    policy: str,
    lengths: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    predicted: Tensor | None = None,
) -> list[ViewedResponse]:
    """Every round of some responses. lengths: (P,) what a round from each position drafts; predicted: (M,) P̂ of each
    token, if the policy predicts."""
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
    """The text of single tokens: what each adds to the one before it, so that spaces stay where they belong."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: int):
        self.tokenizer, self.ids, self.prompt = tokenizer, ids, prompt

    def at(self, step: int, token: int, before: int | None = None) -> str:
        """A token at a step of the response, after `before` or the response's own."""
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
                # Of what is drafted after a rejection the target was never asked.
                acceptance=record["acceptance"][step + depth] if depth <= accepted else None,
                draft_probability=float(traces.logprob[token].exp()),
                entropy=float(traces.entropy[token]),
                status="accepted" if depth < accepted else "rejected" if depth == accepted else "discarded",
            )
        )
        before = int(traces.ids[token])
    emitted = step + accepted
    if emitted >= len(record["response_ids"]):  # an accepted end token
        return ViewedRound(drafted=tokens, emitted="", kind="end")
    piece = text.at(emitted, record["response_ids"][emitted])
    return ViewedRound(drafted=tokens, emitted=piece, kind="redrawn" if accepted < drafted else "bonus")


def calibrate_depths(traces: CoupledTraces, head: str, predicted: Tensor) -> list[CalibrationCurve]:
    """Predicted against true acceptance at each depth, over the tokens whose predecessors in the round were all
    accepted, in rounds that are as long as can be: at any shorter ones the head itself would have chosen the tokens.

    predicted: (M,) P̂ of each token. The truth is a(Y) = min(1, p/q), of which verification's coin is a draw.
    """
    starts = round_starts(traces, traces.drafts)
    reached = torch.minimum(traces.drafts, traces.leading + 1)[starts]
    positions = torch.cat([torch.arange(int(s), int(s + n)) for s, n in zip(starts, reached, strict=True)])
    depths = torch.cat([torch.arange(1, int(n) + 1) for n in reached])
    truth = torch.from_numpy(np.concatenate(traces.traces.with_format("numpy")["acceptance"][:]))
    curves = []
    for low, high in DEPTHS:
        mine = positions[(depths >= low) & (depths <= (high or traces.k_max))]
        if len(mine):
            label = f"{low}" if low == high else f"{low}-{high}" if high else f"{low}+"
            curves.append(_curve(head, label, predicted[mine].double(), truth[mine].double()))
    return curves


def _curve(head: str, depth: str, predicted: Tensor, observed: Tensor) -> CalibrationCurve:
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(index, minlength=BINS)
    filled = counts > 0
    means = [
        (torch.zeros(BINS, dtype=torch.double).index_add_(0, index, values) / counts)[filled].tolist()
        for values in (predicted, observed)
    ]
    return CalibrationCurve(
        head=head,
        depth=depth,
        count=len(predicted),
        predicted=means[0],
        observed=means[1],
        counts=counts[filled].tolist(),
        ece=expected_calibration_error(predicted, observed, BINS),
    )
