"""Gives rows to requests as they arrive, and drops rows that no request will need."""

from __future__ import annotations

import torch

from accept_head.inference.decode.run import Run
from accept_head.inference.decode.waiting import Waiting


def admit(run: Run, waiting: Waiting) -> None:
    """Give idle rows to waiting requests and feed both models their prompts without the last token."""
    rows, drafting = run.rows, run.drafting
    requests = waiting.take(rows.requests.count(None))
    if not requests:
        return compact(run) if waiting.done else None
    taken = rows.admit(requests)
    ends = [len(request.prompt) - 1 for request in requests]
    if drafting.max_draft_tokens:
        run.drafter.admit(run.target, taken, ends)
    else:
        run.target.fill(rows.tokens, taken, [0] * len(taken), ends)
    index = torch.tensor(taken, device=rows.keys.device)
    drafting.admit(index, rows.lengths[index])
    named = [(row, request.tenant) for row, request in zip(taken, requests, strict=True) if request.tenant]
    if named:
        places, keys = zip(*named, strict=True)
        drafting.set_tenants(torch.tensor(places, device=index.device), keys)


def compact(run: Run) -> None:
    """Drop idle rows when they are a quarter of the batch, unless compiled shapes are static."""
    rows = run.rows
    live = rows.live_rows
    if live and not run.target.static and 4 * len(live) <= 3 * len(rows.requests):
        index = torch.tensor(live, device=rows.keys.device)
        for part in (run.target, run.drafter, run.drafting):
            part.select(index)
        rows.select(index, live)
