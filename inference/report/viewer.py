"""The report's round viewer: its HTML, and the data that its script (in page.html) shows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from accept_head.inference.report.data import ViewedResponse, ViewedRound

LEGEND = "".join(
    f'<li><span class="token p{i}">{low:.1f}–{low + 0.2:.1f}</span></li>'
    for i, low in enumerate((0.0, 0.2, 0.4, 0.6, 0.8))
)
VIEWER = f"""<p>Each numbered round is what the draft proposed, coloured by the predicted acceptance P̂, and the token
that the target added. Point at a token, tap it, or move with the arrow keys (left and right between tokens, up and
down between
rounds) for its numbers.</p>
<noscript><p class="note">The round viewer needs JavaScript; everything else on this page does not.</p></noscript>
<div id="viewer" hidden>
<div class="controls"><label>Prompt <select id="choose-prompt"></select></label>
<label>Policy <select id="choose-policy"></select></label>
<button type="button" id="previous">‹ Previous round</button><button type="button" id="next">Next round ›</button></div>
<p class="note" id="shown"></p>
<pre class="prompt" id="prompt" tabindex="0" aria-label="Prompt"></pre>
<p id="state" aria-live="polite"></p>
<div class="text" id="text" role="group" aria-label="The response, round by round"></div>
<p class="counts" id="counts"></p>
<ul class="legend" aria-label="Legend"><li>P̂:</li>{LEGEND}
<li><span class="token accepted">accepted</span></li><li><span class="token rejected">rejected</span></li>
<li><span class="token discarded">discarded after a rejection</span></li>
<li><span class="token target redrawn">redrawn by the target</span></li>
<li><span class="token target bonus">bonus</span></li>
<li>⏎ line end</li><li>· space</li><li>⇥ tab</li></ul>
</div>
"""


def viewer(responses: Sequence[ViewedResponse]) -> str:
    return VIEWER if responses else ""


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
