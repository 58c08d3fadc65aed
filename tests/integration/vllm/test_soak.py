"""The soak's comparison detects errors, and a short soak of both servers finds none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from vllm_soak import (
    GAUGES,
    HARD,
    MEMORY_GROWTH,
    MEMORY_SLOPE,
    PLUGIN,
    Idle,
    Outcome,
    Phase,
    Request,
    Run,
    differences,
    errors,
    grows,
    growth,
    schedule,
    soak,
    what_was_asked,
)

GREEDY = Request("text", {"temperature": 0})
SAMPLED = Request("text", {"temperature": 0.7})
CANCELLED = Request("text", {"temperature": 0, "stream": True}, cancel_after=3)
REFUSED = Request("empty text", {"temperature": 0})
OURS, VLLMS = "vllm:accept_head_num_verified_tokens_total", "vllm:spec_decode_num_draft_tokens_total"


# --- what the comparison finds ---------------------------------------------------------------------------------------


@pytest.fixture
def phases() -> list[Phase]:
    return [Phase(8, True, [GREEDY, SAMPLED, CANCELLED, REFUSED]), Phase(8, False, [GREEDY])]


@pytest.fixture
def plain() -> Run:
    """Nothing is wrong."""
    answers = [
        Outcome(200, "", [5, 6, 7], "one two three", "length"),
        Outcome(200, "", [8, 9], "four five", "stop"),
        Outcome(200, "", [5, 6], "one two", None),
        Outcome(400, "BadRequestError: empty"),
    ]
    idle = [Idle(n, 1.0, {"worker": 100.0}, {**dict.fromkeys(GAUGES, 0.0), OURS: n, VLLMS: n}) for n in (0, 4, 5)]
    log = "(Worker pid=17) INFO 11-21 18:24:12 fine\n(Worker pid=17) ERROR 11-21 18:24:13 as everywhere"
    return Run("vllm", [answers, copy.deepcopy(answers[:1])], idle, log, 0)


@pytest.fixture
def served(plain: Run) -> Run:
    """As plain, and different where it may be."""
    run = copy.deepcopy(plain)
    run.outcomes[0][1] = Outcome(200, "", [4], "six", "length")
    run.outcomes[0][2] = Outcome(200, "", [5, 6, 7, 8], "one two three four", None)
    run.log = (
        "(Worker pid=99) ERROR 11-21 19:00:00 as everywhere\n(Worker pid=99) WARNING 11-21 19:00:01 of speculation"
    )
    return run


def test_what_may_differ_is_no_difference(phases: list[Phase], plain: Run, served: Run) -> None:
    assert differences(phases, plain, served) == []


def test_a_token_of_a_greedy_response(phases: list[Phase], plain: Run, served: Run) -> None:
    served.outcomes[1][0].tokens[2] = 8
    (found,) = differences(phases, plain, served)
    assert found.startswith("phase 1, request 0 (text): greedy ([5, 6, 7], 'one two three', 'length') without")


@pytest.mark.parametrize("change", [{"tokens": [5, 6]}, {"text": "one two"}, {"finish": "stop"}], ids=str)
def test_what_a_greedy_response_lacks(change: dict[str, Any], phases: list[Phase], plain: Run, served: Run) -> None:
    vars(served.outcomes[0][0]).update(change)
    assert len(differences(phases, plain, served)) == 1


def test_what_had_arrived_of_a_cancelled_response(phases: list[Phase], plain: Run, served: Run) -> None:
    served.outcomes[0][2].tokens[1] = 9
    assert len(differences(phases, plain, served)) == 1


@pytest.mark.parametrize(
    ("index", "outcome"),
    [
        (0, Outcome(500, "InternalServerError: gone")),
        (1, Outcome(0, "ServerDisconnectedError()")),
        (1, Outcome(200, "error in the middle of a stream", [8, 9], "four five", "stop")),
        (3, Outcome(400, "BadRequestError: another")),
        (3, Outcome(200, "", [1], "a", "stop")),
    ],
)
def test_an_error(index: int, outcome: Outcome, phases: list[Phase], plain: Run, served: Run) -> None:
    served.outcomes[0][index] = outcome
    (found,) = differences(phases, plain, served)
    assert f"phase 0, request {index}" in found


def test_the_log_and_the_exit_status(phases: list[Phase], plain: Run, served: Run) -> None:
    served.log += "\n(EngineCore pid=98) ERROR 11-21 19:00:02 [core.py:1] of its own\nRuntimeError: untimely"
    served.exit_status = 1
    assert differences(phases, plain, served) == [
        "only the plugin's log says: ERROR  [core.py:1] of its own",
        "only the plugin's log says: RuntimeError: untimely",
        "the exit status is 1, without the plugin 0",
    ]
    assert len(errors(served.log)) == 3


@pytest.mark.parametrize("gauge", GAUGES)
def test_what_is_left_when_idle(gauge: str, phases: list[Phase], plain: Run, served: Run) -> None:
    served.idle[-1].metrics[gauge] = 0.01
    assert differences(phases, plain, served) == [f"after 5 requests {gauge} is 0.01, expected 0"]


@pytest.mark.parametrize("hard", [True, False])
def test_our_counts_are_compared_where_they_can_be(hard: bool, phases: list[Phase], plain: Run, served: Run) -> None:
    served.idle[1 if hard else 2].metrics[OURS] += 1
    served.idle[2].metrics[OURS] += hard
    assert len(differences(phases, plain, served)) == (not hard)


def test_memory_that_grows() -> None:
    sent = [200 * n for n in range(1, 13)]
    assert grows(growth(sent, [3000.0] * 12)) == []
    steady = growth(sent, [3000 * (1 + 0.03 * n / 1000) for n in sent])
    assert steady.slope == pytest.approx(0.03 / (1 + 0.03 * 0.2)) and len(grows(steady)) == 2
    step = growth(sent, [3000.0] * 11 + [3000 * (1.01 + MEMORY_GROWTH)])
    assert [sentence[:20] for sentence in grows(step)] == ["memory grows: share "]
    assert grows(growth(sent, [3000.0 + 30 * (n % 400 == 0) for n in sent])) == []
    assert 0 < MEMORY_SLOPE < MEMORY_GROWTH < 0.1


# --- a short one -----------------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_schedule() -> None:
    phases = schedule(0, 200)
    assert phases == schedule(0, 200) != schedule(1, 200)
    requests = [request for phase in phases for request in phase.requests]
    assert len(requests) >= 2000 and max(phase.concurrency for phase in phases) == 32
    assert {request.kind for request in requests} == {"text", *HARD}
    assert 0.04 < sum(request.cancel_after is not None for request in requests) / len(requests) < 0.08
    assert 0.4 < sum(request.greedy for request in requests) / len(requests) < 0.6


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """Real servers, eager. Too short for memory."""
    phases = schedule(0, 20, concurrency=(32, 4, 8))
    plain, served = (
        soak([*options, "--enforce-eager"], phases, tmp_path / f"{len(options)}.log") for options in ([], PLUGIN)
    )
    assert differences(phases, plain, served) == []
    asked = what_was_asked(phases, plain)
    assert asked["requests"] == 60 and asked["cancelled"] > 0 and asked["whole_greedy_responses"] > 10
    statuses = {outcome.status for answers in served.outcomes for outcome in answers}
    assert statuses == {200, 400}
    assert served.idle[-1].metrics[OURS] > 100 and OURS not in plain.idle[-1].metrics
