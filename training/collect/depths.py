"""Traces of a drafter that reads the target's states: each position scored for rounds from every earlier one.

A finished response is read once by the target, for its states and its distributions, and `depths` times by the drafter,
which is a single layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished
from accept_head.inference.engine.call import states_of
from accept_head.inference.replay.depths import roll_out_rounds, states_by_depth
from accept_head.pair import Pair
from accept_head.trace.columns import DRAFT_COLUMNS
from accept_head.trace.config import TraceConfig
from accept_head.training.collect.score import CHUNK_ELEMENTS, coupled_columns

ROLLOUTS = "rollouts"  # among a record's columns; written to a file of their own


class DepthScoring:
    """As Scoring: what `watch`es a run, and gives the columns of a finished response."""

    def __init__(self, pair: Pair, config: TraceConfig):
        assert isinstance(pair.draft, Eagle3Drafter) and config.depths is not None
        self.target, self.drafter, self.config, self.vocab_size = pair.target, pair.draft, config, pair.vocab_size
        self.depths = config.depths
        self.drafted = pair.draft.drafted_ids  # ascending
        self.reader = states_of(pair.target, pair.draft.layers_read)

    def __call__(self, round: Round) -> None:
        """Nothing to do before a response is finished."""

    @torch.no_grad()
    def columns(self, done: Finished) -> dict[str, Any]:
        index, prompt, count = done.request.index, len(done.request.prompt), len(done.token_ids)
        if prompt < 2:
            raise InputError(f"prompt {index} has one token, but an EAGLE-3 drafter begins with the second")
        text = torch.tensor([*done.request.prompt, *done.token_ids], device=self.target.device)
        logits, states = self._read(text, count)
        hidden, own = states_by_depth(self.drafter, text, states, prompt, self.depths)
        steps = torch.arange(count, device=text.device)
        counters = torch.stack([torch.full_like(steps, index), steps], dim=-1)
        p, x = self._among_drafted(logits, text[prompt:])
        sampling, by_depth = self.config.sampling, []
        for depth in range(self.depths):
            scores = torch.nn.functional.pad(self.drafter.lm_head(hidden[:, depth]), (0, 1), value=-torch.inf)
            q = sampling.probabilities(scores)
            described = sampling.signal_probabilities(scores, q)
            by_depth.append(coupled_columns(p, q, described, x, counters, seed=self.config.seed))
        kept = [name for name in DRAFT_COLUMNS if name in by_depth[0]]
        of_draft = {name: torch.stack([each[name] for each in by_depth], dim=-1) for name in kept}
        of_draft["draft_ids"] = self.drafted[of_draft["draft_ids"]]
        rollouts = roll_out_rounds(
            self.drafter, text, states, own, of_draft["accepted"], of_draft["draft_ids"], self.config, index
        )
        of_draft["divergence"] = torch.full_like(of_draft["overlap"], torch.nan)  # infinite: it lacks tokens
        columns = by_depth[0] | of_draft | {"response_ids": text[prompt:]}
        lists = {name: values.flatten().tolist() for name, values in columns.items()}
        return lists | {ROLLOUTS: rollouts | {"fed_hidden": hidden.flatten(0, 1).cpu()}}

    def _among_drafted(self, logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(p, place of x) over the ids that the drafter can draft, in order, and one more: x where it is none of them.
        The drafter gives all others probability 0, so that no column needs them.

        logits: (n, vocab) of the target, x: (n,) → (n, ids + 1) and (n,).
        """
        chunk = max(1, CHUNK_ELEMENTS // self.vocab_size)
        p, p_of_x = [], []
        for part, tokens in zip(logits.split(chunk), x.split(chunk), strict=True):
            whole = self.config.sampling.probabilities(part)
            p.append(whole[:, self.drafted])
            p_of_x.append(whole.gather(-1, tokens[:, None]))
        place = torch.searchsorted(self.drafted, x).clamp(max=len(self.drafted) - 1)
        other = self.drafted[place] != x
        last = torch.where(other[:, None], torch.cat(p_of_x), 0.0)
        return torch.cat([torch.cat(p), last], dim=-1), torch.where(other, len(self.drafted), place)

    def _read(self, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The target's logits of the last `count` tokens, (count, vocab), and the projected states of all but the
        last."""
        self.reader.wanted = True
        logits = self.target(text[None, :-1], use_cache=False, logits_to_keep=count).logits[0]
        self.reader.wanted = False
        states = self.drafter.project(self.reader.last[0])
        del self.reader.last
        return logits[:, : self.vocab_size], states
