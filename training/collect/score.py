"""The columns of traces: coupling, labels and draft signals, from the logits of both models.

`score` runs both models over given responses. `score_positions` and `coupled_columns` need no model; decoding.py and
depths.py call them as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability, couple_with_target, divergence, overlap
from accept_head.alternatives import draw_alternatives
from accept_head.inference.engine.memory import available_bytes
from accept_head.pair import Pair, input_device
from accept_head.randomness import TraceStream, uniforms
from accept_head.sampling import Sampling
from accept_head.signals import SIGNALS, draft_signals
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.training.halving import REMEDY, Halving

# Logits turned into probabilities at a time. Bounds memory at about 0.25 GB for any vocabulary.
CHUNK_ELEMENTS = 1 << 23
LOGIT_SHARE = 0.25  # of the available memory, for the logits of the responses that are scored together


def scoring_halving() -> Halving:
    return Halving("scoring", REMEDY)


def score(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int,
    indices: Sequence[int],
    drawn_with: Sampling | None = None,
    alternatives: int = 0,
    halving: Halving | None = None,
) -> list[dict[str, list]]:
    """The columns of each trace (see POSITION_COLUMNS and ALTERNATIVE_COLUMNS in trace/columns.py).

    indices: each prompt's index. With `seed` and the position it decides the coupling's random numbers, so a trace does
    not depend on the batch it is scored in.
    drawn_with: the settings that the target drew the responses with; `sampling` when left out. The coupling needs the
    distribution of X to get Y ∼ q. The labels are those of `sampling`.
    alternatives: further draws at each position. The other columns do not depend on it.

    Raises InputError when not even one sequence fits in memory.
    """

    def score_some(start: int, stop: int) -> list[dict[str, list]]:
        rows = slice(start, stop)
        return _score_batch(
            pair, prompts[rows], responses[rows], sampling, drawn_with or sampling, seed, indices[rows], alternatives
        )

    halving = halving or scoring_halving()
    halving.most = halving.most or _most_rows(pair, max(map(len, responses)))
    return halving(len(prompts), score_some)


def _most_rows(pair: Pair, longest: int) -> int:
    """How many responses are scored together. Their logits are in memory at once, those of their prompts are not."""
    needed = 2 * longest * pair.vocab_size * pair.draft.dtype.itemsize
    return max(1, int(LOGIT_SHARE * available_bytes(input_device(pair.target)) / needed))


@torch.no_grad()
def _score_batch(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
    drawn_with: Sampling,
    seed: int,
    indices: Sequence[int],
    alternatives: int,
) -> list[dict[str, list]]:
    lengths = [len(response) for response in responses]
    rows = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)])
    steps = torch.cat([torch.arange(n) for n in lengths])
    target_logits, draft_logits = (
        _logits(model, prompts, responses)[rows, steps, : pair.vocab_size] for model in (pair.target, pair.draft)
    )
    device = target_logits.device
    columns = score_positions(
        target_logits,
        draft_logits.to(device),
        torch.tensor([token for response in responses for token in response], device=device),
        torch.stack([torch.tensor(indices)[rows], steps], dim=-1).to(device),
        sampling,
        seed=seed,
        alternatives=alternatives,
        drawn_with=drawn_with,
    )
    split = {name: values.split(lengths) for name, values in columns.items()}
    return [{name: values[row].flatten().tolist() for name, values in split.items()} for row in range(len(responses))]


def score_positions(
    target_logits: Tensor,
    draft_logits: Tensor,
    x: Tensor,
    counters: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    alternatives: int = 0,
    drawn_with: Sampling | None = None,
) -> dict[str, Tensor]:
    """The columns of some positions, on the CPU: (positions,) each, and (positions, alternatives) for alternatives.

    Logits: (positions, vocab), of the tokens x, (positions,). counters: (positions, 2), prompt index and step. seed,
    alternatives, drawn_with: as for `score`.
    """
    chunk = max(1, CHUNK_ELEMENTS // target_logits.shape[-1])
    parts = [
        _score_chunk(p, q, tokens, counter, sampling, drawn_with or sampling, seed, alternatives)
        for p, q, tokens, counter in zip(
            target_logits.split(chunk), draft_logits.split(chunk), x.split(chunk), counters.split(chunk), strict=True
        )
    ]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def _score_chunk(
    target_logits: Tensor,
    draft_logits: Tensor,
    x: Tensor,
    counters: Tensor,
    sampling: Sampling,
    drawn_with: Sampling,
    seed: int,
    alternatives: int,
) -> dict[str, Tensor]:
    p, q = sampling.probabilities(target_logits), sampling.probabilities(draft_logits)
    p_of_x = p if drawn_with == sampling else drawn_with.probabilities(target_logits)
    columns = coupled_columns(
        p, q, sampling.signal_probabilities(draft_logits, q), x, counters, seed=seed, p_of_x=p_of_x
    )
    columns["divergence"] = divergence(target_logits, draft_logits, sampling.temperature or 1.0)
    if alternatives:
        index, step = counters.unbind(-1)
        draws = torch.arange(alternatives, device=x.device)
        random = uniforms(seed, index.unsqueeze(-1), step.unsqueeze(-1), TraceStream.ALTERNATIVES, draws)
        columns |= dict(zip(ALTERNATIVE_COLUMNS, draw_alternatives(p, q, random), strict=True))
    return columns


def coupled_columns(
    p: Tensor,
    q: Tensor,
    described: Tensor,
    x: Tensor,
    counters: Tensor,
    *,
    seed: int,
    p_of_x: Tensor | None = None,
) -> dict[str, Tensor]:
    """The coupling of X with Y, its labels and the draft signals, (positions,) each. p, q, described: (positions, ids);
    signals are of the last. p_of_x: what x was drawn from; p when left out."""
    accept_uniform, redraw_uniform = (
        uniforms(seed, *counters.unbind(-1), stream) for stream in (TraceStream.ACCEPT, TraceStream.REDRAW)
    )
    draft_ids, accepted = couple_with_target(p if p_of_x is None else p_of_x, q, x, accept_uniform, redraw_uniform)
    return {
        "response_ids": x,
        "draft_ids": draft_ids,
        "accepted": accepted,
        "acceptance": acceptance_probability(p, q, draft_ids),
        "overlap": overlap(p, q),
        "target_logprob": p.gather(-1, x.unsqueeze(-1)).squeeze(-1).clamp(min=torch.finfo(p.dtype).tiny).log(),
        **dict(zip(SIGNALS, draft_signals(described, draft_ids).unbind(-1), strict=True)),
    }


def _logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
    """The logits that each response token was drawn from, (batch, longest response, vocab); others mean nothing.

    Prompts are padded on the left, so that all responses begin in one column, and on the right.
    """
    width, longest, device = max(map(len, prompts)), max(map(len, responses)), input_device(model)
    ids, mask = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        fed = [*prompt, *response[:-1]]
        left, right = width - len(prompt), longest - len(response)
        ids.append([0] * left + fed + [0] * right)
        mask.append([0] * left + [1] * len(fed) + [0] * right)
    attended = torch.tensor(mask, device=device)
    positions = (attended.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": torch.tensor(ids, device=device), "attention_mask": attended, "position_ids": positions}
    return model(**inputs, use_cache=False, logits_to_keep=longest).logits
