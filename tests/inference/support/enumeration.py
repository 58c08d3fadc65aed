"""The exact distribution of the decode loop's output, by enumeration of all outcomes of all random choices.

A row's random numbers decide three kinds of choices: which token is drafted, whether it is accepted, and which token
follows the accepted ones. For the enumerated row a *script* decides them by outcome. After the end of the script, the
row's own random numbers decide. The loop runs once for each leaf of the tree of outcomes. The weight of a leaf is the
product of the probabilities that the loop gave to the outcomes on the way. The weights sum to 1. All other code that
runs is the loop's. One line enumerates a policy:

    emitted_distribution(target, draft, prompts, lambda: MyPolicy(), Sampling(top_k=2), 4, enumerated_row=1)

Choices that nothing depends on must not be in the tree: a draw for a row that has stopped drafting (it is drawn because
other rows continue), and acceptance tests after the first rejection. They stay random. The enumeration asserts that the
loop does not use them. It also asserts that no random number decides twice, because the product of probabilities
assumes independent choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference import DraftPolicy, DraftStep
from accept_head.inference.decode import steps
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.kernels import verify
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import Verifier
from accept_head.signals import SIGNALS
from tests.inference.support.toy import TOKENS, llama

Response = tuple[int, ...]
Script = tuple[int, ...]
Distribution = dict[Response, float]
PROVED = 1e-6  # float32 probabilities, multiplied up
MOST_ROWS = 4096  # of one batch, when many leaves are run at once


@cache
def uncertain_pair(seed: int = 6, vocab: int = TOKENS) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(target, draft), both with many likely responses, that agree about half of the time."""
    return llama(seed, vocab, layers=2, sharpness=1.5), llama(seed + 1, vocab, sharpness=1.5)


def random_head_policy(
    threshold: float = 0.5, reads: Any = "drawn", predicts: Any = "token", std: float = 1.0, **options: Any
) -> HeadPolicy:
    """A head whose scores are all over [0, 1], so that rows stop at different depths; less so with a smaller std."""
    torch.manual_seed(7)
    statistics: Any = {"signals": SIGNALS, "signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)}
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=1, reads=reads, predicts=predicts, **statistics))
    torch.nn.init.normal_(head.output.weight, std=std)
    return HeadPolicy(head, threshold, **options)


def emitted_distribution(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy_factory: Callable[[], DraftPolicy],
    sampling: Sampling,
    length: int | Sequence[int],
    enumerated_row: int = 0,
    *,
    batch_size: int | None = None,
    leaves_together: bool = False,
    end_token_ids: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    seed: int = 0,
    watch: Callable[[Round], None] | None = None,
) -> Distribution:
    """response → probability, of what the loop emits for prompts[enumerated_row] while it decodes all prompts.

    policy_factory: makes a new policy for each run. length: new tokens, of all prompts or of each. batch_size: as in
    `generate`. leaves_together: run all leaves that are known as rows of one batch, each with this one prompt: much
    faster, but only for a policy that looks at each row alone; else a script would not lead where it led before.

    The other rows go by their random numbers, the same in every run, so this is the distribution *given* them. Equal to
    the target's, it says more than the distribution over all random numbers, which is all that sampling could show:
    that one is an average, in which biases of opposite sign cancel. And a row whose distribution is the same whatever
    the others draw is independent of them. For a policy that looks at the whole batch this is what has to be shown.
    """
    lengths = [length] * len(prompts) if isinstance(length, int) else length
    requests = make_requests(prompts, 1)
    requests = [replace(request, max_new_tokens=n) for request, n in zip(requests, lengths, strict=True)]
    processing = Processing(sampling, target.config.vocab_size, repetition_penalty=repetition_penalty)
    stopping = Stopping(end_token_ids, [], target.device)

    def run(scripts: Sequence[Script]) -> list[Path]:
        paths = {enumerated_row + i: Path(script) for i, script in enumerate(scripts)}
        batch = requests
        if leaves_together:
            batch = [replace(requests[enumerated_row], index=index, key=index) for index in paths]
        policy = policy_factory()
        decoder = make_decoder(target, draft, batch, policy, batch_size=batch_size, greedy=False)
        with scripted(decoder, paths) as director:
            overheard = _Overheard(policy, director)

            def check_and_watch(seen: Round) -> None:
                director.check(seen)
                if watch:
                    watch(seen)

            for done in decoder.run(
                batch,
                policy=overheard,
                processing=processing,
                stopping=stopping,
                seed=seed,
                verifier=verifier,
                allow_lossy=allow_lossy,
                watch=check_and_watch,
            ):
                if done.request.index in paths:
                    paths[done.request.index].response = tuple(done.token_ids)
                    if all(path.response for path in paths.values()):
                        break  # what the others do from here on is of no interest
        return list(paths.values())

    return explore(run, MOST_ROWS if leaves_together else 1)


def explore(run: Callable[[Sequence[Script]], list[Path]], at_once: int) -> Distribution:
    """Run every leaf of the tree of outcomes once. The leaves' weights have to sum to 1."""
    emitted: Distribution = {}
    frontier: list[Script] = [()]
    while frontier:
        scripts, frontier = frontier[-at_once:], frontier[:-at_once]
        for path in run(scripts):
            assert len(path.outcomes) >= len(path.script), "a script did not lead where it led before"
            emitted[path.response] = emitted.get(path.response, 0.0) + path.weight
            frontier += path.alternatives()
    assert abs(sum(emitted.values()) - 1) < PROVED
    return emitted


@dataclass
class Path:
    """One row's way through its choices, and their probabilities."""

    script: Script
    outcomes: list[int] = field(default_factory=list)
    probabilities: list[list[float]] = field(default_factory=list)
    numbers: set[float] = field(default_factory=set)
    response: Response = ()

    def choose(self, probabilities: list[float], number: float, by_number: int) -> int:
        """probabilities: of the outcomes 0, 1, …; by_number: the one that the loop's random number leads to."""
        place = len(self.outcomes)
        outcome = self.script[place] if place < len(self.script) else by_number
        assert probabilities[outcome] > 0
        assert number not in self.numbers, "a random number decides two choices"
        self.numbers.add(number)
        self.outcomes.append(outcome)
        self.probabilities.append(probabilities)
        return outcome

    @property
    def weight(self) -> float:
        weight = 1.0
        for probabilities, outcome in zip(self.probabilities, self.outcomes, strict=True):
            weight *= probabilities[outcome]
        return weight

    def alternatives(self) -> list[Script]:
        """The scripts that leave this path at a choice that was not scripted."""
        return [
            (*self.outcomes[:place], outcome)
            for place in range(len(self.script), len(self.outcomes))
            for outcome, probability in enumerate(self.probabilities[place])
            if probability > 0 and outcome != self.outcomes[place]
        ]


@contextmanager
def scripted(decoder: Decoder, paths: dict[int, Path]) -> Iterator[_Director]:
    """Within this context paths[index] decides for the request of that index."""
    director = _Director(decoder, paths)
    with (
        patch.object(steps, "draw", director.draft(steps.draw)),
        patch.object(steps, "by_ratio", director.verification(steps.by_ratio)),
        patch.object(steps, "sampler_match", director.matching(steps.sampler_match)),
        patch.object(verify, "acceptance_probability", director.acceptance(verify.acceptance_probability)),
        patch.object(verify, "draw", director.next_token(verify.draw)),
    ):
        yield director


class _Director:
    """Stands where the loop makes its choices, and lets the paths make them."""

    def __init__(self, decoder: Decoder, paths: dict[int, Path]):
        self.decoder, self.paths = decoder, paths

    def rows(self) -> list[tuple[int, Path]]:
        """The enumerated rows that are live, by their places in the batch."""
        requests = enumerate(self.decoder.rows.requests)
        return [
            (row, self.paths[request.index]) for row, request in requests if request and request.index in self.paths
        ]

    def start_round(self, budget: Tensor) -> None:
        rows = self.decoder.rows
        self.budget = torch.minimum(budget, rows.max_lengths - rows.lengths - 1).tolist()
        self.depth, self.drawn, self.stopped = 0, [0] * len(budget), [False] * len(budget)

    def keep_drafting(self, keep: Tensor) -> None:
        self.stopped = [stopped or not goes_on for stopped, goes_on in zip(self.stopped, keep.tolist(), strict=True)]

    def draft(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Drafted tokens, up to and including the one after which the policy or the budget said stop."""

        def drafting(q: Tensor, uniform: Tensor) -> Tensor:
            if q.ndim == 3:  # the target's own tokens, of sampler match
                return self._matched(draw, q, uniform)
            self.depth += 1
            going = [row for row, _ in self.rows() if self.depth <= self.budget[row] and not self.stopped[row]]
            for row in going:
                self.drawn[row] = self.depth
            return self._drawn(draw, q, uniform, set(going))

        return drafting

    def verification(self, verify: Callable[..., Any]) -> Callable[..., Any]:
        def verifying(p: Tensor, q: Tensor, ids: Tensor, drafted: Tensor, accepts: Tensor, redraws: Tensor) -> Any:
            self.drafted, self.accept_numbers = drafted.tolist(), accepts
            self.accepted = [0] * len(p)
            return verify(p, q, ids, drafted, accepts, redraws)

        return verifying

    def matching(self, verify_match: Callable[..., Any]) -> Callable[..., Any]:
        def verifying(p: Tensor, ids: Tensor, drafted: Tensor, numbers: Tensor) -> Any:
            self.drafted, self.candidates = drafted.tolist(), ids.tolist()
            self.accepted = [0] * len(p)
            return verify_match(p, ids, drafted, numbers)

        return verifying

    def acceptance(self, acceptance_probability: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Acceptance tests of submitted tokens, up to the first that fails."""

        def testing(p: Tensor, q: Tensor, y: Tensor) -> Tensor:
            probability = acceptance_probability(p, q, y)
            values, numbers, forced = probability.tolist(), self.accept_numbers.tolist(), probability.clone()
            for row, path in self.rows():
                for slot in range(self.drafted[row]):
                    a, number = values[row][slot], numbers[row][slot]
                    accepted = path.choose([1 - a, a], number, int(number < a))
                    forced[row, slot] = 2.0 if accepted else 0.0
                    self.accepted[row] += accepted
                    if not accepted:
                        break
            return forced

        return testing

    def next_token(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The token after the accepted ones."""

        def drawing(probabilities: Tensor, uniform: Tensor) -> Tensor:
            return self._drawn(draw, probabilities, uniform, {row for row, _ in self.rows()})

        return drawing

    def _drawn(self, draw: Callable[..., Tensor], weights: Tensor, uniform: Tensor, chosen: set[int]) -> Tensor:
        ids = draw(weights, uniform)
        weights = weights.double() / weights.double().sum(-1, keepdim=True)
        probabilities, numbers, by_number = weights.tolist(), uniform.tolist(), ids.tolist()
        for row, path in self.rows():
            if row in chosen:
                by_number[row] = path.choose(probabilities[row], numbers[row], by_number[row])
        return torch.tensor(by_number)

    def _matched(self, draw: Callable[..., Tensor], weights: Tensor, uniform: Tensor) -> Tensor:
        ids = draw(weights, uniform).tolist()
        weights = weights.double() / weights.double().sum(-1, keepdim=True)
        probabilities, numbers = weights.tolist(), uniform.tolist()
        for row, path in self.rows():
            for slot in range(self.drafted[row] + 1):
                ids[row][slot] = path.choose(probabilities[row][slot], numbers[row][slot], ids[row][slot])
                if slot == self.drafted[row] or ids[row][slot] != self.candidates[row][slot]:
                    break
                self.accepted[row] += 1
        return torch.tensor(ids)

    def check(self, seen: Round) -> None:
        """After each round: nothing that was not in the tree had a part in it."""
        submitted, accepted = seen.drafted.submitted.tolist(), seen.verified.accepted.tolist()
        for row, _ in self.rows():
            assert submitted[row] <= self.drawn[row], "a token was submitted that its row did not draft"
            assert submitted[row] == self.drafted[row], "others were verified than were submitted"
            assert accepted[row] == self.accepted[row], "tokens were accepted by other tests than their own"


class _Overheard:
    """A policy, and what it says told to the director."""

    def __init__(self, policy: DraftPolicy, director: _Director):
        self.policy, self.director = policy, director
        if hasattr(policy, "draw_next"):
            self.draw_next = self._draw_next

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def start_round(self, live: Tensor) -> Tensor:
        budget = self.policy.start_round(live)
        self.director.start_round(budget)
        return budget

    def _draw_next(self, step: DraftStep) -> Tensor:
        keep = self.policy.draw_next(step)
        self.director.keep_drafting(keep)
        return keep

    def keep_drafting(self, step: DraftStep) -> Tensor:
        keep = self.policy.keep_drafting(step)
        self.director.keep_drafting(keep)
        return keep


@torch.no_grad()
def target_distribution(
    target: PreTrainedModel,
    prompt: Sequence[int],
    sampling: Sampling,
    length: int,
    *,
    end_token_ids: Sequence[int] = (),
    repetition_penalty: float = 1.0,
) -> Distribution:
    """response → probability under the target alone: a plain forward a prefix, without a cache, and the chain rule."""
    growing: Distribution = {(): 1.0}
    finished: Distribution = {}
    for _ in range(length):
        longer: Distribution = {}
        for response, weight in growing.items():
            prefix = [*prompt, *response]
            logits = target(torch.tensor([prefix])).logits[0, -1].clone()
            for token in set(prefix):
                logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
            for token, p in enumerate(sampling.probabilities(logits[None])[0].double().tolist()):
                if p > 0:
                    (finished if token in end_token_ids else longer)[*response, token] = weight * p
        growing = longer
    return finished | growing


def total_variation(one: Distribution, other: Distribution) -> float:
    return sum(abs(one.get(response, 0.0) - other.get(response, 0.0)) for response in one.keys() | other.keys()) / 2
