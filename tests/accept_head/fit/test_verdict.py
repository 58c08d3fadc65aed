"""The simplest policy that none surely beats, from runs whose every count and second is known."""

from __future__ import annotations

import numpy as np
import pytest

from accept_head.cost import ForwardCosts
from accept_head.fit.decoding import counts_by_kind
from accept_head.fit.verdict import KINDS, costs_of_runs, judge
from accept_head.inference.bench.kept import kept_runs
from accept_head.inference.bench.measure import Chunk, Timed
from accept_head.inference.decode.rows import DecodeStats, Finished, Request

COSTS = ForwardCosts(t_draft=0.01, t_target=0.1, t_autoregressive=0.09)
NAMES = dict(zip(KINDS, ("none", "fixed:3", "max-prob:0.5", "head:0.4"), strict=True))
PROMPTS, TOKENS, PROMPT_SECONDS = 24, 100, 0.001


def runs(rounds, drafts, spread=2.0, seed=0):
    """rounds, drafts: of each kind, on average; every prompt has its own. The clock is eq. 3.1, and the prompts'."""
    random, found = np.random.default_rng(seed), []
    for chunk in range(PROMPTS // 4):
        requests = [Request(i, (1,) * int(random.integers(5, 50)), TOKENS, i) for i in range(4 * chunk, 4 * chunk + 4)]
        for kind, mean_rounds, mean_drafts in zip(KINDS, rounds, drafts, strict=True):
            finished, seconds = [], 0.0
            for request in requests:
                n = max(1, round(mean_rounds + spread * random.normal())) if mean_drafts else TOKENS
                d = round(mean_drafts + spread * random.normal()) if mean_drafts else 0
                counts = {"drafted": d, "submitted": d, "accepted": TOKENS - n, "rounds": n, "draft_forwards": d}
                stats = DecodeStats(generated=TOKENS, seconds=0.0, **counts)
                finished.append(Finished(request, [7] * TOKENS, stats))
                step = COSTS.t_target if mean_drafts else COSTS.t_autoregressive
                seconds += step * n + COSTS.t_draft * d + PROMPT_SECONDS * len(request.prompt)
            found.append(Timed(0, chunk, kind, seconds, seconds, TOKENS, finished))
    return found


def verdict(rounds, drafts, **options):
    found = runs(rounds, drafts, **options)
    return judge(counts_by_kind(found), found, NAMES, COSTS)


def test_a_head_that_is_surely_better_is_used():
    found = verdict((100, 50, 45, 38), (0, 150, 130, 120))
    assert found.use == "head"
    gain = found.gains["head"]["fixed"]
    assert gain.low < gain.value < gain.high and gain.low > 0
    assert gain.value == pytest.approx((50 * 0.1 + 150 * 0.01) / (38 * 0.1 + 120 * 0.01) - 1, abs=0.03)
    text = " ".join(found.lines())
    assert "use head:0.4" in text and "than fixed:3" in text and "than max-prob:0.5" in text
    assert found.clock["head"]["none"].value == pytest.approx(found.gains["head"]["none"].value, abs=0.05)


def test_a_head_that_is_hardly_better_is_not():
    found = verdict((100, 50, 45, 44.9), (0, 150, 130, 130), spread=6.0)
    assert found.use == "rule" and "head:0.4 is" in " ".join(found.lines())


def test_a_head_that_takes_longer_than_it_saves_is_not():
    """Counted forwards do not know what asking it takes."""
    found = runs((100, 50, 45, 38), (0, 150, 130, 120))
    slow = [run._replace(wall=1.4 * run.wall) if run.arm == "head" else run for run in found]
    verdict = judge(counts_by_kind(slow), slow, NAMES, COSTS)
    assert verdict.use == "rule" and verdict.gains["head"]["rule"].low > 0 > verdict.clock["head"]["rule"].high
    assert "slower" in next(line for line in verdict.lines() if line.startswith("head:0.4 is"))


def test_the_simplest_of_equals_is_used():
    assert verdict((100, 50, 50, 50), (0, 150, 150, 150), spread=6.0).use == "fixed"


def test_where_drafting_costs_more_than_it_saves_nothing_is_drafted():
    found = verdict((100, 90, 89, 88), (0, 400, 400, 400))
    assert found.use == "none" and "do not speculate" in found.lines()[0]
    assert "slower" in found.lines()[1] and "max-prob" not in found.lines()[0]


def test_the_forward_times_of_the_runs_are_found():
    found = costs_of_runs(runs((100, 50, 45, 38), (0, 150, 130, 120)))
    for name in ("t_draft", "t_target", "t_autoregressive"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)


def test_runs_without_a_sound_fit_give_none():
    found = [run._replace(wall=1 / (1 + len(run.arm))) for run in runs((100, 50, 45, 38), (0, 150, 130, 120))]
    assert costs_of_runs([run._replace(wall=-run.wall) for run in found]) is None


def test_counts_are_in_the_order_of_prompts():
    found = runs((100, 50, 45, 38), (0, 150, 130, 120))
    table = counts_by_kind(list(reversed(found)))
    first = next(done for run in found if run.arm == "head" for done in run.finished if done.request.index == 5)
    assert table["head"][5].tolist() == [TOKENS, first.stats.discarded, first.stats.rounds, first.stats.draft_forwards]


def test_kept_runs_go_on_where_they_were(tmp_path):
    expected = {(run.chunk, run.arm): run for run in runs((100, 50, 45, 38), (0, 150, 130, 120))}
    chunks = [Chunk(None, [done.request for done in expected[number, "none"].finished]) for number in range(6)]
    asked = []

    def run(arm, requests):
        if len(requests) == 1:
            return 0.0, 0.0, 0, []  # the warm-up
        asked.append((requests[0].index // 4, arm))
        return expected[asked[-1]][3:]

    path = tmp_path / "runs.jsonl"
    kept, new = kept_runs(run, KINDS, chunks, path)
    assert not kept
    whole = list(new)
    assert sorted(asked) == sorted(expected) and {(each.chunk, each.arm): each for each in whole} == expected
    lines = path.read_text().splitlines()
    half = lines[10][: lines[10].index("]") + 1]  # killed in the middle of a line, just where a list ends
    path.write_text("\n".join([*lines[:10], half]))
    asked.clear()
    kept, new = kept_runs(run, KINDS, chunks, path)
    assert len(kept) == 9
    again = [*kept, *new]
    assert len(asked) == len(expected) - 9 and {(each.chunk, each.arm): each for each in again} == expected
    kept, new = kept_runs(run, KINDS, chunks, path)
    assert kept == again and not list(new)
