"""One teacher-forced pass of both models over stored responses: coupling, labels and draft signals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability, couple_with_target, divergence, overlap
from accept_head.alternatives import draw_alternatives
from accept_head.pair import Pair, input_device
from accept_head.randomness import TraceStream, uniforms
from accept_head.sampling import Sampling
from accept_head.signals import SIGNALS, draft_signals
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.training.halving import Halving

# Logits turned into probabilities at a time. Bounds memory at about 0.5 GB for any vocabulary.
CHUNK_ELEMENTS = 1 << 24


def scoring_halving() -> Halving:
    return Halving("scoring", "lower --max_new_tokens, or spread the target with --device_map auto")


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
    target_logits: Sequence[Tensor] | None = None,
    halving: Halving | None = None,
) -> list[dict[str, list]]:
    """The columns of each trace (see POSITION_COLUMNS and ALTERNATIVE_COLUMNS in trace/columns.py).

    indices: each prompt's index. With `seed` and the position it decides the coupling's random numbers, so a trace does
    not depend on the batch it is scored in.
    drawn_with: the settings that the target drew the responses with; `sampling` when left out. The coupling needs the
    distribution of X to get Y ∼ q. The labels are those of `sampling`.
    alternatives: further draws at each position. The other columns do not depend on it.
    target_logits: (response, vocab) of each response, if known from drawing it. Otherwise the target runs.

    Raises InputError when not even one sequence fits in memory.
    """

    def score_some(start: int, stop: int) -> list[dict[str, list]]:
        rows = slice(start, stop)
        return _score_batch(
            pair, prompts[rows], responses[rows], sampling, drawn_with or sampling, seed, list(indices[rows]),
            alternatives, None if target_logits is None else target_logits[rows],
        )  # fmt: skip

    return (halving or scoring_halving())(len(prompts), score_some)


@torch.no_grad()
def _score_batch(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
    drawn_with: Sampling,
    seed: int,
    indices: list[int],
    alternatives: int,
    known_logits: Sequence[Tensor] | None,
) -> list[dict[str, list]]:
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    lengths = [len(response) for response in responses]
    # (rows, columns) of the positions to read: the distribution of response token i is one position before it.
    rows = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)])
    steps = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([len(prompt) for prompt in prompts])
    columns = starts[rows] + steps - 1

    # (positions, vocab)
    first = int(columns.min())
    drawn_from = torch.cat(list(known_logits)) if known_logits is not None else None
    if drawn_from is None:
        drawn_from = _logits(pair.target, sequences, first)[rows, columns - first]
    target_logits = drawn_from[:, : pair.vocab_size]
    draft_logits = _logits(pair.draft, sequences, first)[rows, columns - first, : pair.vocab_size]
    draft_logits = draft_logits.to(target_logits.device)
    response_ids = torch.tensor([token for response in responses for token in response], device=target_logits.device)
    counters = torch.stack([torch.tensor(indices)[rows], steps], dim=-1).to(target_logits.device)

    chunk = max(1, CHUNK_ELEMENTS // pair.vocab_size)
    parts = [
        _score_positions(p, q, x, sampling, drawn_with, seed, counter, alternatives)
        for p, q, x, counter in zip(
            target_logits.split(chunk),
            draft_logits.split(chunk),
            response_ids.split(chunk),
            counters.split(chunk),
            strict=True,
        )
    ]
    columns_of_all = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
    split = {name: values.split(lengths) for name, values in columns_of_all.items()}
    return [{name: values[row].flatten().tolist() for name, values in split.items()} for row in range(len(responses))]


def _score_positions(
    target_logits: Tensor,
    draft_logits: Tensor,
    x: Tensor,
    sampling: Sampling,
    drawn_with: Sampling,
    seed: int,
    counters: Tensor,
    alternatives: int,
) -> dict[str, Tensor]:
    """The columns of some positions: (positions,) each, and (positions, alternatives) for alternatives.

    Logits: (positions, vocab). x: (positions,). counters: (positions, 2), prompt index and step.
    """
    p, q = sampling.probabilities(target_logits), sampling.probabilities(draft_logits)
    p_of_x = p if drawn_with == sampling else drawn_with.probabilities(target_logits)
    index, step = counters.unbind(-1)
    accept_uniform, redraw_uniform = (
        uniforms(seed, index, step, stream) for stream in (TraceStream.ACCEPT, TraceStream.REDRAW)
    )
    draft_ids, accepted = couple_with_target(p_of_x, q, x, accept_uniform, redraw_uniform)
    signals = draft_signals(sampling.signal_probabilities(draft_logits, q), draft_ids)
    temperature = sampling.temperature or 1.0
    others = {}
    if alternatives:
        draws = torch.arange(alternatives, device=x.device)
        random = uniforms(seed, index.unsqueeze(-1), step.unsqueeze(-1), TraceStream.ALTERNATIVES, draws)
        others = dict(zip(ALTERNATIVE_COLUMNS, draw_alternatives(p, q, random), strict=True))
    return {
        "response_ids": x,
        "draft_ids": draft_ids,
        "accepted": accepted,
        "acceptance": acceptance_probability(p, q, draft_ids),
        "overlap": overlap(p, q),
        "target_logprob": p.gather(-1, x.unsqueeze(-1)).squeeze(-1).clamp(min=torch.finfo(p.dtype).tiny).log(),
        "divergence": divergence(target_logits / temperature, draft_logits / temperature),
        **dict(zip(SIGNALS, signals.unbind(-1), strict=True)),
        **others,
    }


def _logits(model: PreTrainedModel, sequences: list[list[int]], first: int) -> Tensor:
    """The logits of positions from `first` on, (batch, seq − first, vocab).

    Sequences are padded on the right, where a causal model does not see the padding.
    """
    width = max(map(len, sequences))
    device = input_device(model)
    ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=device)
    return model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=width - first).logits
