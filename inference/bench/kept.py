"""Side-by-side runs that are kept in a file, one line a run, so that an interrupted comparison goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accept_head.inference.bench.measure import Chunk, Timed
from accept_head.inference.decode.rows import DecodeStats, Finished, Request

# (arm, requests) → wall-clock seconds, process seconds, rounds of the loop, responses
Run = Callable[[str, Sequence[Request]], tuple[float, float, int, list[Finished]]]


def kept_runs(
    run: Run, arms: Sequence[str], chunks: Sequence[Chunk], path: Path
) -> tuple[list[Timed], Iterator[Timed]]:
    """The runs that the file has, and those that are still to do: of every arm on every chunk, in a random order for
    each chunk. A policy that learns begins anew when a comparison goes on."""
    requests = {request.index: request for chunk in chunks for request in chunk.requests}
    lines = path.read_text().splitlines() if path.is_file() else []
    done = [each for line in lines if (each := _read(line, requests)) is not None]
    return done, _new_runs(run, arms, chunks, path, {(each.chunk, each.arm) for each in done})


def _new_runs(
    run: Run, arms: Sequence[str], chunks: Sequence[Chunk], path: Path, known: set[tuple[int, str]]
) -> Iterator[Timed]:
    if len(known) < len(arms) * len(chunks):
        for arm in arms:  # the first run of each is slower
            run(arm, chunks[0].requests[:1])
    for number, chunk in enumerate(chunks):
        for index in np.random.default_rng([0, number]).permutation(len(arms)):
            if (number, arms[index]) not in known:
                timed = Timed(0, number, arms[index], *run(arms[index], chunk.requests))
                with path.open("a") as file:
                    file.write(f"\n{json.dumps(_written(timed))}")
                yield timed


def _written(timed: Timed) -> list[Any]:
    responses = [[each.request.index, each.token_ids, asdict(each.stats)] for each in timed.finished]
    return [*timed[:-1], responses]


def _read(line: str, requests: dict[int, Request]) -> Timed | None:
    try:
        repeat, chunk, arm, wall, cpu, rounds, responses = json.loads(line)
    except json.JSONDecodeError:  # empty, or the half of a line that a killed run leaves
        return None
    finished = [Finished(requests[index], ids, DecodeStats(**stats)) for index, ids, stats in responses]
    return Timed(repeat, chunk, arm, wall, cpu, rounds, finished)
