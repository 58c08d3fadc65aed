"""The data of the report's round viewer, as the script in page.html reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from accept_head.inference.report.data import ViewedResponse, ViewedRound


def viewer_data(responses: Sequence[ViewedResponse]) -> list[dict[str, Any]]:
    """Responses by prompt, in order. Two prompts with equal text stay separate."""
    prompts: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    seen: dict[tuple[str, str, str], int] = {}
    for response in responses:
        same = (response.prompt, response.domain, response.policy)
        number = seen[same] = seen.get(same, -1) + 1
        rounds = [_round(viewed) for viewed in response.rounds]
        viewed = {"policy": response.policy, "rounds": rounds}
        prompts.setdefault((response.prompt, response.domain, number), []).append(viewed)
    return [
        {"prompt": prompt, "domain": domain, "policies": policies} for (prompt, domain, _), policies in prompts.items()
    ]


def _round(viewed: ViewedRound) -> list[Any]:
    """[kind, emitted, [[text, P̂, survival, a, q, entropy, status's first letter], …]]."""
    return [
        viewed.kind,
        viewed.emitted,
        [
            [
                token.text,
                *map(_short, (token.predicted, token.survival, token.acceptance)),
                *map(_short, (token.draft_probability, token.entropy)),
                token.status[0],
            ]
            for token in viewed.drafted
        ],
    ]


def _short(value: float | None) -> float | None:
    """The number with four digits, the most that the page shows."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def script_json(value: Any) -> str:
    """JSON for a <script>: in ASCII, so that broken Unicode is kept as escapes, and without <, which could end it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
