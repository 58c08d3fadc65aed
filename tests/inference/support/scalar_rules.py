"""The policies' rules in scalars, lists and loops, written from their formulas, and what they are compared on.

A class with `drafts(shown, room)` and `verified(round)` is one row, for `Rowwise`; a `Reference` is the batch.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from accept_head.cost import BatchForwardCost, PairCosts
from tests.inference.support.rounds import Reference, Rowwise


def pair_costs(draft, token=0.0, target=1.0, row=0.0, context=0.0):
    """Seconds of a draft step (and a row of it), of a token to verify, of a verification, and of a context token."""
    return PairCosts(
        draft=BatchForwardCost(alpha=context / 10, beta=row, gamma=draft, r_squared=1.0),
        target=BatchForwardCost(alpha=context, beta=token, gamma=target, r_squared=1.0),
    )


class OtherWhenPlain(PairCosts):
    """A round without drafts takes four fifths of what its tokens say."""

    @property
    def coefficients(self):
        draft, first, target, plain, padding = super().coefficients
        return [draft, first, target, [0.8 * each for each in plain], padding]


class InBlocks(PairCosts):
    """Two thirds of what a token takes are for its place in a block."""

    @property
    def coefficients(self):
        return [*super().coefficients[:4], [0.0, by_block_of(self), 0.0]]


def by_block_of(costs):
    """Seconds of a token's place, where the host verifies in blocks."""
    return costs.target.beta * 2 / 3 if isinstance(costs, InBlocks) else 0.0


def blocks(host, tokens, more):
    """That so many more tokens begin."""
    return math.ceil((tokens + more) / host.block) - math.ceil(tokens / host.block)


class DearFirst(PairCosts):
    """The first draft step of a round takes longer."""

    @property
    def coefficients(self):
        draft, (*slopes, fixed), *others = super().coefficients
        return [draft, [*slopes, fixed + first_more(self)], *others]

    def draft_seconds(self, rows, context_tokens, steps=1):
        return super().draft_seconds(rows, context_tokens, steps) + first_more(self) * (steps > 0)


def first_more(costs):
    """Seconds that the first draft step of a round takes longer than another."""
    return 2 * costs.draft.gamma if isinstance(costs, DearFirst) else 0.0


def costs_of(draft=1e-3, token=2e-3, context=0.0):
    return pair_costs(draft, token, target=10e-3, row=draft / 20, context=context)


def drawn(max_q, q=None):
    """What policies are shown of tokens; as likely as the likeliest, if nothing else is said."""
    return {"max_prob": max_q, "logprob": np.log(max_q if q is None else q)}


def graph_sized(tokens, stride):
    """The next of the sizes that a serving engine captures: powers of two up to the stride, then its multiples."""
    size = 1
    while size < tokens:
        size += size if size < stride else stride
    return size


# --- thresholds -------------------------------------------------------------------------------------------------------


def product_rule(probabilities, threshold, most, *, k_min=1, lag=0):
    """SpecDec++ §4.2, one row: after how many tokens, at most `most`, 1 − Π P̂ of those judged is above the threshold.
    probabilities: of its tokens, the first on. lag: how many of the last drawn are not judged yet."""
    product = 1.0
    for length in range(1, most):
        if length > lag:
            product *= probabilities[length - lag - 1]
        if length >= k_min and 1 - product > threshold:
            return length
    return most


class FirstBelow:
    """One row that stops after the first token where the least score so far, or the product of all, is below a level.
    score: of what the signal says of a token."""

    def __init__(self, signal, score, level, statistic=min, k_min=1, k_max=20):
        self.signal, self.score, self.level, self.statistic = signal, score, level, statistic
        self.k_min, self.k_max = k_min, k_max

    def drafts(self, shown, room):
        scores = [self.score(value) for value in shown[self.signal]]
        most = min(self.k_max, len(scores), room)
        stops = (k for k in range(self.k_min, most) if self.statistic(scores[:k]) < self.level)
        return next(stops, most)

    def verified(self, round):
        pass


class MeanOfBatch(Reference):
    """All rows stop when the mean of max q over those that may still draft is less."""

    def __init__(self, threshold):
        self.threshold = threshold

    def drafts(self, live, given, lengths):
        max_q, room = zip(*((given.shown["max_prob"][row], given.of(row)[1]) for row in live), strict=True)
        for depth in range(1, len(max_q[0]) + 1):
            going = [row for row, most in enumerate(room) if most > depth]
            if not going or np.mean([max_q[row][depth - 1] for row in going]) < self.threshold:
                break
        return [min(depth, most) for most in room]


class ScalarAdaEdl:
    """One row of docs/theory.md §8."""

    def __init__(self, level, longest, k_min=1):
        self.level, self.rate, self.longest, self.k_min = level, 0.9, longest, k_min

    def drafts(self, shown, room):
        """The first k_min tokens are drawn whatever their entropy is."""
        entropies = shown["entropy"][:room]
        declined = (n for n, h in enumerate(entropies) if n >= self.k_min and 1 - math.sqrt(0.2 * h) < self.level)
        return next(declined, len(entropies))

    def verified(self, round):
        if round.drafted == 0:
            return
        self.rate = 0.5 * self.rate + 0.5 * round.accepted / round.drafted
        if self.rate < 0.9:
            wanted = self.level + 0.01
        elif round.accepted != self.longest:
            wanted = self.level - 0.01
        else:
            wanted = self.level
        self.level = 0.9 * self.level + 0.1 * wanted


# --- transformers' own ------------------------------------------------------------------------------------------------


class Theirs:
    """transformers' class, without models, as the reference of one row."""

    def __init__(self, schedule="constant", threshold=0.0, k=20, most=math.inf):
        self.generator = generator = object.__new__(AssistedCandidateGenerator)
        generator.assistant_generation_config = SimpleNamespace(
            num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=threshold
        )
        generator.generation_config = SimpleNamespace(assistant_confidence_threshold=threshold)
        generator.num_assistant_tokens, generator.probs, generator.matches = k, [], []
        self.most = most  # which transformers has not

    def drafts(self, shown, room):
        return min(room, self.generator.num_assistant_tokens)

    def verified(self, round):
        self.generator.update_candidate_strategy(None, [range(round.drafted + 1)], round.accepted)
        self.generator.num_assistant_tokens = min(self.most, self.generator.num_assistant_tokens)


class Persisting(Rowwise):
    """Requests begin with the rounded mean K of the last round."""

    def __init__(self, k):
        self.first = k
        super().__init__(lambda: Theirs("heuristic_transient", k=self.first))

    def verified(self, rounds):
        super().verified(rounds)
        self.first = round(np.mean([self.rows[each.row].generator.num_assistant_tokens for each in rounds]))


class TheirThreshold(Reference):
    """One θ of all rows together."""

    def __init__(self, policy):
        self.policy, self.theirs, self.seen = policy, Theirs(threshold=policy.threshold).generator, set()

    @property
    def threshold(self):
        return self.theirs.assistant_generation_config.assistant_confidence_threshold

    def drafts(self, live, given, lengths):
        self.shown, drafted = {}, []
        for row in live:
            shown, room = given.of(row)
            self.shown[row] = q = np.exp(shown["logprob"][:room]).tolist()
            stops = (n for n, value in enumerate(q, 1) if n >= self.policy.k_min and value < self.threshold)
            drafted.append(next(stops, len(q)))
        return drafted

    def verified(self, rounds):
        for each in rounds:
            self.theirs.probs.extend(self.shown[each.row][: each.drafted])
            self.theirs.update_candidate_strategy(None, [range(each.drafted + 1)], each.accepted)

    def state(self):
        assert len(self.policy.matches) == len(self.theirs.matches)
        assert self.policy.matches.sum() == sum(self.theirs.matches)
        self.seen.add(round(self.policy.threshold, 3))
        return {"threshold": self.threshold}


# --- what is learnt of earlier rounds ---------------------------------------------------------------------------------


class ScalarLeviathan:
    """One row, from theorem 3.8."""

    def __init__(self, cost, k_max, rate=0.7, prior=5.0, probe=16):
        self.cost, self.k_max, self.probe, self.idle = cost, k_max, probe, 0
        self.accepted, self.judged = rate * prior, prior

    def speed(self, gamma):
        alpha = self.accepted / self.judged
        tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
        return tokens / (1 + gamma * self.cost)

    def drafts(self, shown, room):
        best = max(range(self.k_max + 1), key=self.speed)
        return min(room, 1 if best == 0 and self.idle >= self.probe and self.cost < 1 else best)

    def as_good(self, said, expected):
        return math.isclose(self.speed(said), self.speed(expected), rel_tol=1e-6)

    def verified(self, round):
        self.idle = 0 if round.drafted else self.idle + 1
        self.accepted += round.accepted
        self.judged += min(round.drafted, round.accepted + 1)


def spread(values, decay):
    weights = [decay**i for i in range(len(values))]
    newest_first = values[::-1]
    mean = sum(w * v for w, v in zip(weights, newest_first, strict=True)) / sum(weights)
    return sum(w * (v - mean) ** 2 for w, v in zip(weights, newest_first, strict=True)) / sum(weights)


class ScalarDsde:
    """One row, eqs 1-8."""

    cap = staticmethod(np.mean)

    def __init__(self):
        self.values, self.first, self.accepted, self.last = [], [], [], 0.0

    def calibrated(self):
        return len(self.accepted) == 6

    def warm(self):
        return 8

    def predicted(self):
        longest = max(self.accepted) * (1 + np.mean(self.first) / (max(self.first) + 1e-6))
        longest = min(20.0, max(2.0, longest))
        ratio = spread(self.values[-10:], 0.85) / spread(self.values[-30:], 0.85)
        penalty = (math.exp(2 * self.last) - 1) * ratio
        return (1 - penalty) * (longest - 2) + 2 if penalty <= 1 else 2.0

    def as_good(self, said, expected):
        return self.calibrated() and abs(said - expected) < 0.5 + 1e-3

    def verified(self, round):
        if round.divergence:
            self.learn(round.accepted, round.divergence)

    def learn(self, accepted, values):
        if not self.calibrated():
            self.accepted.append(accepted)
            self.first += values
        self.values += values
        self.last = np.mean(values)


class ScalarFork(ScalarDsde):
    """One row of the authors' KLScheduler, with k_min 2, k_max 20, 30 tokens of warm-up, sampled at T = 0.5."""

    def __init__(self):
        super().__init__()
        self.k, self.ready = 5, False

    def calibrated(self):
        return self.ready

    def warm(self):
        return self.k

    def predicted(self):
        longest = round(max(self.accepted) * (1 + 0.5 * np.mean(self.first) / max(self.first)))
        longest = min(20, max(2, longest))
        shortest = min(longest, max(2, math.ceil(longest * 0.1)))
        known = self.values[-30:]
        overall = spread(known, 0.9)
        ratio = 20.0 if overall < 1e-6 else spread(known[-(len(known) // 3) :], 0.9) / overall
        penalty = ratio * (math.exp(2 * self.last / 0.5) - 1)
        return max(shortest, math.ceil((longest - shortest) * (1 - penalty) + shortest)) if penalty <= 1 else shortest

    @staticmethod
    def cap(predictions):
        return math.ceil(np.mean(predictions))

    def learn(self, accepted, values):
        self.values += values
        self.last = np.mean(values)
        if self.ready:
            return
        if len(self.values) < 30:
            self.accepted.append(accepted)
            self.first += values
            self.k = min(2 * self.k, 20) if accepted >= self.k else self.k
        else:
            self.ready = True


class Capped(Rowwise):
    """Rows that know enough draft what they predict, but no more than the batch's cap."""

    def __init__(self, make, caps=True):
        super().__init__(make)
        self.caps = caps
        self.capped, self.seen, self.warm = 0, set(), set()

    def drafts(self, live, given, lengths):
        predicted = {row: self.rows[row].predicted() for row in live if self.rows[row].calibrated()}
        cap = self.make.cap(list(predicted.values())) if predicted and self.caps else math.inf
        self.capped += sum(value > cap for value in predicted.values())
        self.warm |= {self.rows[row].warm() for row in live if row not in predicted}
        wanted = [min(predicted[row], cap) if row in predicted else self.rows[row].warm() for row in live]
        self.seen |= {round(float(k)) for row, k in zip(live, wanted, strict=True) if row in predicted}
        return [min(k, given.of(row)[1]) for row, k in zip(live, wanted, strict=True)]


class ScalarBandit(Reference):
    """All rows play an arm; the round counts if one of them could."""

    def __init__(self, arms, shared=False):
        self.arms, self.shared, self.rewards, self.t = arms, shared, {arm: [] for arm in arms}, 1
        self.played = []

    def bound(self, arm, top):
        n = sum(map(len, self.rewards.values())) if self.shared else len(self.rewards[arm])
        return np.mean(self.rewards[arm]) / top + math.sqrt(6 * math.log(self.t) / n)

    def chooses(self):
        if self.t < 2 * len(self.arms):
            return self.arms[(self.t - 1) % len(self.arms)]
        top = max(max(rewards) for rewards in self.rewards.values())
        return max(self.arms, key=lambda arm: self.bound(arm, top))

    def drafts(self, live, given, lengths):
        return [min(self.chooses(), given.of(row)[1]) for row in live]

    def verified(self, rounds):
        if max(each.drafted for each in rounds) < self.chooses():
            return
        self.played.append(self.chooses())
        self.rewards[self.chooses()].append(sum(each.accepted + 1 for each in rounds) / rounds[0].seconds)
        self.t += 1


def log_odds(q):
    if q >= 1:
        return 40.0
    return max(-40.0, min(40.0, math.log(q / (1 - q))))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


class ScalarEstimator:
    """vLLM's estimator in scalars and one dense matrix: parameters (ω, β_1, …, β_K), labels one by one."""

    def __init__(self, depths):
        self.theta = np.array([0.5] + [-0.2] * depths)
        self.rounds = 0
        self.clear()

    def clear(self):
        n = len(self.theta)
        self.hessian, self.gradient, self.labels = np.zeros((n, n)), np.zeros(n), np.zeros(n - 1)

    def probability(self, depth, q):
        return sigmoid(self.theta[0] * log_odds(q) + self.theta[depth])

    def round(self, rows):
        """rows: (max q of each drafted token, submitted, accepted) of each live row."""
        for qs, submitted, accepted in rows:
            for depth, q in enumerate(qs[:submitted], start=1):
                if depth > accepted + 1:
                    break
                x = np.zeros(len(self.theta))
                x[0], x[depth] = log_odds(q), 1.0
                p = self.probability(depth, q)
                self.hessian += p * (1 - p) * np.outer(x, x)
                self.gradient += (float(depth <= accepted) - p) * x
                self.labels[depth - 1] += 1
        self.rounds += 1
        if self.rounds % 100 == 0:
            self.refit()

    def refit(self):
        ridged = self.hessian + 1e-3 * np.eye(len(self.theta))
        n = self.labels.sum()
        slope = np.linalg.solve(ridged, self.gradient)[0] * n / (n + 50)
        if self.theta[0] + slope < 0:
            slope = 0.0
        intercepts = np.linalg.solve(ridged[1:, 1:], self.gradient[1:] - ridged[1:, 0] * slope)
        self.theta += np.concatenate([[slope], intercepts * self.labels / (self.labels + 50)])
        self.clear()


class ScalarLogistic(Reference):
    """Rows stop where the product of the estimator's p is too small."""

    def __init__(self, threshold, k_min, k_max):
        self.threshold, self.k_min, self.estimator = threshold, k_min, ScalarEstimator(k_max)

    def drafts(self, live, given, lengths):
        self.shown = {row: given.of(row)[0]["max_prob"] for row in live}
        drafted = []
        for q in self.shown.values():
            left = np.cumprod([self.estimator.probability(depth, each) for depth, each in enumerate(q, 1)])
            stops = (n for n, each in enumerate(left, 1) if n >= self.k_min and each < self.threshold)
            drafted.append(next(stops, len(q)))
        return drafted

    def verified(self, rounds):
        self.estimator.round([(self.shown[each.row], each.submitted, each.accepted) for each in rounds])


# --- costs ------------------------------------------------------------------------------------------------------------


class ScalarGoodput(Reference):
    """From the formula of docs/theory.md §8. What was accepted outlives a batch."""

    def __init__(self, costs, rate, decay, longest, probe):
        self.costs, self.decay, self.longest, self.probe = costs, decay, longest, probe
        self.accepted, self.judged = rate * 20, 20.0
        self.seen = set()

    def start(self):
        self.idle = 0

    def drafts(self, live, given, lengths):
        rows, context, a = len(lengths), sum(lengths), self.accepted / self.judged
        best, best_goodput = 0, -1.0
        for k in range(self.longest + 1):
            tokens = rows * (k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a))
            draft, target = self.costs.draft, self.costs.target
            seconds = k * (draft.alpha * context + draft.beta * rows + draft.gamma)
            seconds += (k > 0) * first_more(self.costs)
            seconds += target.alpha * context + target.beta * (k + 1) * rows + target.gamma
            goodput = tokens / seconds * (1.1 if k == 0 else 1)
            if goodput > best_goodput:
                best, best_goodput = k, goodput
        if best == 0 and self.probe and self.idle >= self.probe:
            best = 1
        self.idle = self.idle + 1 if best == 0 else 0
        self.seen.add(best)
        return [min(best, given.of(row)[1]) for row in live]

    def verified(self, rounds):
        judged = sum(min(each.drafted, each.accepted + 1) for each in rounds)
        if judged:
            self.accepted = self.decay * self.accepted + sum(each.accepted for each in rounds)
            self.judged = self.decay * self.judged + judged

    def state(self):
        return {"accepted": self.accepted, "judged": self.judged}


class ScalarBudget(Reference):
    """Lists and brute force. last: for each row its ŝ of the round before."""

    def __init__(self, costs, longest, cap, graph, retrospective):
        self.costs, self.longest, self.cap, self.graph = costs, longest, cap, graph
        self.retrospective = retrospective
        self.estimator = ScalarEstimator(longest)
        self.budgets, self.depths = set(), set()

    def start(self):
        self.depth, self.last = self.longest, []

    def admit(self, row, length):
        self.last[row : row + 1] = [[float(depth < self.depth) for depth in range(self.longest)]]

    def select(self, order):
        self.last = [self.last[row] for row in order]

    def best(self, slots, steps):
        """slots: (ŝ, depth) from the best on → (m*, deepest of the m*). steps: None = as many as are needed."""
        found = (-1.0, 0, 0)
        for m in range(len(slots) + 1):
            reach, tokens = max((depth for _, depth in slots[:m]), default=0), self.rows + m
            forwards = max(1, reach) if steps is None else steps
            draft = self.costs.draft
            seconds = forwards * (draft.alpha * self.context + draft.beta * self.rows + draft.gamma)
            seconds += first_more(self.costs)
            seconds += self.costs.verify_seconds(graph_sized(tokens, 8) if self.graph else tokens, self.context)
            goodput = (self.rows + sum(s for s, _ in slots[:m])) / seconds
            if goodput > found[0] + 1e-9:
                found = (goodput, m, reach)
        return found[1:]

    def drafts(self, live, given, lengths):
        self.rows, self.context = len(live), sum(lengths)
        slots = sorted((-self.last[row][d], d + 1) for row in live for d in range(self.longest))
        self.budget, reach = self.best([(-s, depth) for s, depth in slots], None if self.cap else self.longest)
        if self.cap:
            self.depth = max(1, reach)
        self.survivals, self.max_q = {}, {}
        for row in live:
            shown, room = given.of(row)
            self.max_q[row] = shown["max_prob"]
            own = shown["max_prob"][: min(self.depth, room)]
            own = [self.estimator.probability(depth, max_q) for depth, max_q in enumerate(own, 1)]
            self.survivals[row] = np.cumprod(own).tolist()
        kept = self.trim()
        self.budgets.add(self.budget)
        self.depths.add(self.depth)
        return [(len(self.survivals[row]), kept[row]) for row in live]

    def trim(self):
        slots = sorted((-s, depth + 1, row) for row, own in self.survivals.items() for depth, s in enumerate(own))
        if self.retrospective:
            steps = max(len(own) for own in self.survivals.values())
            self.budget, _ = self.best([(-s, depth) for s, depth, _ in slots], steps)
        kept = dict.fromkeys(self.survivals, 0)
        for _, depth, row in slots[: self.budget]:
            kept[row] += 1
            assert kept[row] == depth, "a prefix of each row"
        return kept

    def verified(self, rounds):
        self.estimator.round([(self.max_q[each.row], each.submitted, each.accepted) for each in rounds])
        for row in range(len(self.last)):
            own = self.survivals.get(row, [])
            rate = own[-1] ** (1 / len(own)) if own else 0.0
            self.last[row] = own + [rate**depth for depth in range(len(own) + 1, self.longest + 1)]

    def state(self):
        return {"budget": self.budget, "last": self.last}


class ScalarAdaSpec(Reference):
    """Algorithms 1 to 3 of the paper, in floats and lists; and the default elimination."""

    def __init__(self, policy, costs):
        self.costs, self.longest, self.slo = costs, policy.max_draft_tokens, policy.slo
        self.graph, self.lossy, self.probe = policy.graph, policy.lossy, policy.probe.every
        self.confidences = []

    def start(self):
        self.last, self.idle = 0.0, 0

    def size(self, tokens):
        return graph_sized(tokens, 32) if self.graph else tokens

    def mean(self):
        return np.mean(self.confidences) if self.confidences else 0.6

    def draft(self, steps):
        total = 0.0
        for step in range(steps):
            tokens = self.size(self.rows)
            total += self.costs.draft.alpha * (self.context + step * self.rows) + self.costs.draft.beta * tokens
            total += self.costs.draft.gamma
        return total + (first_more(self.costs) if steps else 0.0)

    def verify(self, tokens):
        target, tokens = self.costs.target, self.size(tokens)
        return target.alpha * self.context + target.beta * tokens + target.gamma

    def goodput(self, accepted, tokens, steps):
        """Alg. 3."""
        seconds = self.draft(steps) + self.verify(tokens)
        if self.slo and self.verify(self.rows) <= self.slo and steps and seconds > self.slo:
            return -1.0
        return (self.rows + accepted) / seconds

    def round(self, q, lengths, room):
        """Alg. 1. q, room: of live rows → tokens drafted by each, and s of each."""
        self.rows, self.context = len(q), sum(lengths)
        mean = self.mean()
        s, going, tokens, accepted = [[1.0] for _ in q], list(range(len(q))), len(q), 0.0
        self.first = goodput = self.goodput(0.0, tokens, 0)
        drafted, self.began = [0] * len(q), False
        for step in range(1, self.longest + 1):
            ahead = self.goodput(accepted + sum(s[r][-1] * mean for r in going), tokens + len(going), step)
            if step == 1 and ahead <= goodput and self.probe and self.idle >= self.probe and ahead >= 0:
                room = [min(1, most) for most in room]
            elif ahead < goodput or (step == 1 and ahead == goodput):
                break
            self.began = True
            for r in going:
                s[r].append(s[r][-1] * q[r][step - 1])
                accepted += s[r][-1]
                tokens += 1
                drafted[r] += 1
            real = self.goodput(accepted, tokens, step)
            fell, goodput = real < goodput, real
            going = [r for r in going if drafted[r] < room[r]]
            if fell or not going:
                break
        self.idle = 0 if self.began else self.idle + 1
        return drafted, s

    def trim(self, drafted, s, max_q):
        """Alg. 2, or slot by slot what pays at the goodput of the round before."""
        steps, kept = max(drafted), list(drafted)

        def of(kept):
            return self.goodput(sum(sum(s[r][1 : k + 1]) for r, k in enumerate(kept)), self.rows + sum(kept), steps)

        slo = self.slo
        if self.lossy:
            self.slo = 0.0  # fewer tokens take less time
            worst_first = sorted((s[r][k], -k, -r) for r, n in enumerate(drafted) for k in range(1, n + 1))
            while any(kept):
                size = self.rows + sum(kept)
                smaller = [n for n in range(1, size) if graph_sized(n, 32) == n]
                if self.graph and smaller[-1] < self.rows:
                    break
                drop = size - smaller[-1] if self.graph else 1
                fewer = list(kept)
                for _, _, r in worst_first[:drop]:
                    fewer[-r] -= 1
                if of(fewer) < of(kept):
                    break
                kept, worst_first = fewer, worst_first[drop:]
        else:
            price = (self.last or self.first) * self.costs.target.beta
            for r, n in enumerate(drafted):
                kept[r] = next((k for k in range(n) if s[r][k] * max_q[r][k] < price), n)
        self.last, self.slo = of(kept), slo
        return kept

    def drafts(self, live, given, lengths):
        shown, room = zip(*(given.of(row) for row in live), strict=True)
        q = [np.exp(each["logprob"]).tolist() for each in shown]
        drafted, s = self.round(q, lengths, room)
        kept, self.last = drafted, self.last if any(drafted) else self.first
        if any(drafted):
            kept = self.trim(drafted, s, [each["max_prob"] for each in shown])
        self.confidences += [each for own, n in zip(q, drafted, strict=True) for each in own[:n]]
        return list(zip(drafted, kept, strict=True))

    def state(self):
        return {"confidence": self.mean(), "last": self.last}


class ScalarBatchStop(Reference):
    """The end of a round for the batch, around a policy that says what it is told and stops by its product."""

    def __init__(self, costs, k_max, threshold, host, looks_ahead, prior=10.0, optimism=0.9, memory=500.0, probe=32):
        self.costs, self.k_max, self.threshold, self.host = costs, k_max, threshold, host
        self.looks_ahead = looks_ahead
        self.prior, self.optimism, self.memory, self.probe = prior, optimism, memory, probe
        self.accepted, self.before, self.after = [0.0] * k_max, [0.0] * k_max, [0.0] * k_max
        self.drew, self.rows_then = [0.0] * k_max, [0.0] * k_max  # rows, and those of rounds in which any drew one
        self.lately = {name: [0.0] * k_max for name in ("after", "before", "drew", "rows_then")}
        self.row_rounds, self.emitted, self.steps, self.verified_tokens, self.slots = 1.0, 1.0, 0.0, 0.0, 0.0
        self.idle = 0
        self.speculating = 0.0
        self.longest, self.records = set(), {}
        self.rounds, self.waiting = 0, []
        self.priced_by, self.priced = None, None
        self.best = {}  # row → how much of what is expected of a first token to expect of the row's
        self.expected = self.ratio()

    def start(self):
        self.learn()
        self.records, self.best, self.idle, self.priced_by = {}, {}, 0, None

    def admit(self, row, length):
        self.learn()
        self.records[row], self.best[row], self.priced_by = [0.0, 0.0], 1.0, None
        for sums in self.lately.values():  # a share of the recent text was another's
            sums[:] = [(1 - 1 / len(self.records)) * x for x in sums]
        self.expected = self.ratio()

    def select(self, order):
        self.priced_by = None
        for each in ("records", "best"):
            setattr(self, each, {place: getattr(self, each)[row] for place, row in enumerate(order)})

    def mean(self, depth):
        usual = (5 + self.after[depth]) / (5 + self.before[depth])
        return (16 * usual + self.lately["after"][depth]) / (16 + self.lately["before"][depth])

    def share(self, name, depth):
        """Of the sum at the first depth."""
        sums, lately = getattr(self, name), self.lately[name]
        usual = (5 + sums[depth]) / (5 + sums[0])
        return (5 * usual + lately[depth]) / (5 + lately[0])

    def draft_time(self, rows, context):
        return self.costs.draft.alpha * context + self.costs.draft.beta * rows + self.costs.draft.gamma

    def verify_time(self, tokens, context):
        return self.costs.target.alpha * context + self.costs.target.beta * tokens + self.costs.target.gamma

    def price(self, lengths):
        rows, context, beta = len(lengths), sum(lengths), self.costs.target.beta
        padding = beta if self.host.verifies_padding else 0.0
        slot = padding or (by_block_of(self.costs) if self.host.block > 1 else 0.0)
        sums = self.steps, self.emitted, self.verified_tokens, self.slots, self.speculating
        n, tau, ell, slots, share = (x / self.row_rounds for x in sums)
        drafting = n * self.draft_time(rows, context)
        if not self.host.drafts_stopped:
            drafting = n * self.draft_time(0, context) + rows * ell * self.costs.draft.beta
        alone, first_draft = self.costs.plain_seconds(rows, context), first_more(self.costs)
        more = self.verify_time(rows, context) - alone
        seconds = drafting + self.verify_time(rows, context) - (1 - share) * more
        seconds += rows * (ell * (beta - slot) + slots * slot)
        seconds += first_draft if self.host.feeds else share * first_draft
        least = alone + self.host.feeds * (self.draft_time(rows, context) + first_draft)
        speed = max(rows * tau / seconds, rows / least)
        one, step = 0.0, speed * self.draft_time(rows if self.host.drafts_stopped else 0, context)
        first = 0.0 if self.host.feeds else step
        step, first = (price + speed * rows * padding for price in (step, first))
        one += speed * (beta - slot)
        self.block = speed * self.host.block * (slot - padding)
        if not self.host.drafts_stopped:
            one += speed * self.costs.draft.beta
        return one, step, first + speed * (more if self.host.feeds else more + first_draft)

    def gained_later(self, rows):
        """Tokens that rows are expected to gain after the first step, less their price."""
        one, step, _ = self.priced
        best, total, kappa = 0.0, 0.0, 1.0
        for depth in range(self.k_max):
            rho = self.prior * self.optimism * kappa + self.accepted[depth]
            rho *= self.mean(depth) / (self.prior + self.after[depth])
            kappa = (self.prior * kappa + self.accepted[depth]) / (self.prior + self.after[depth])
            if depth:
                total += rows * (rho * self.share("before", depth) - one * self.share("drew", depth))
                total -= step * self.share("rows_then", depth)
                best = max(best, total)
        return best

    def drafts(self, live, given, lengths):
        goes_by = live, self.rounds - len(self.waiting), 0 < self.probe <= self.idle
        if goes_by != self.priced_by:
            self.priced_by, self.priced = goes_by, self.price(lengths)
            self.later = self.gained_later(len(lengths))
        one, step, first = self.priced
        rows = range(len(lengths))
        shown, room = zip(*(given.of(row) for row in live), strict=True)
        told, ahead = ([each[name] for each in shown] for name in ("max_prob", "entropy"))
        drafted, product, going = [0] * len(lengths), [1.0] * len(lengths), set(rows)
        hope = list(product)  # S·β̂
        # live row → S·β̂ before and S after the token was judged, a depth each
        self.live, self.decisions, self.verdicts = live, [], []
        kappa, price, tokens = 1.0, first, len(lengths)
        for depth in range(1, self.k_max + 1):
            rho = self.prior * self.optimism * kappa + self.accepted[depth - 1]
            rho *= self.mean(depth - 1) / (self.prior + self.after[depth - 1])
            kappa = (self.prior * kappa + self.accepted[depth - 1]) / (self.prior + self.after[depth - 1])
            gains = {row: hope[row] * rho for row in going}
            probes = depth == 1 and 0 < self.probe <= self.idle
            if probes:
                gains = dict.fromkeys(going, 1.0)
                room = [min(1, r) for r in room]
            order = sorted((row for row in going if gains[row] > one), key=lambda row: -gains[row])
            sizes = [len(lengths)] if depth == 1 else range(1, len(order) + 1)  # all or none draft the first
            begun = [self.block * blocks(self.host, tokens, m) for m in sizes]
            net = [sum(gains[row] - one for row in order[:m]) - b for m, b in zip(sizes, begun, strict=True)]
            later = self.later if depth == 1 and not probes else 0.0
            pays = bool(order) and max(net) + later > price
            if depth > 1:
                going = set(order[: 1 + int(np.argmax(net))]) if order else set()
            elif not probes:
                going = {row for row in going if gains[row] * self.best[live[row]] > one}
            tokens += len(going)
            if not pays:
                break
            self.decisions.append({row: hope[row] for row in going})
            price = step
            going = {row for row in going if drafted[row] < room[row]}
            for row in going:
                drafted[row] = depth
                product[row] *= told[row][depth - 1]
                hope[row] = product[row] * (ahead if self.looks_ahead else told)[row][depth - 1]
            self.verdicts.append({row: product[row] for row in going})
            going = {row for row in going if product[row] >= self.threshold and drafted[row] < room[row]}
            if not going:
                break
        some = bool(self.decisions and self.decisions[0])
        self.turns = some == (self.idle > 0)
        self.idle = 0 if some else self.idle + 1
        self.longest.add(max(drafted))
        return list(zip(drafted, [min(n, given.cut[row]) for n, row in zip(drafted, live, strict=True)], strict=True))

    def verified(self, rounds):
        """It learns from one round in the beginning, later from eight together, or from as many as have 32 rows; and at
        once where drafting begins or ends."""
        for record in self.records.values():
            record[:] = [x * (1 - 1 / 64) for x in record]
        for each in rounds:
            if each.submitted:
                self.records[each.row][0] += each.accepted > 0
                self.records[each.row][1] += self.expected
        self.waiting.append((rounds, self.live, self.decisions, self.verdicts))
        self.rounds += 1
        many = len(self.waiting) >= min(8, 1 + self.rounds // 8) or len(self.waiting) * len(rounds) >= 32
        if many or self.turns:
            self.learn()

    def learn(self):
        for waiting in self.waiting:
            self.learn_from(*waiting)
        self.waiting = []
        self.expected = self.ratio()
        for row, (hits, expected) in self.records.items():
            self.best[row] = min(1.0, (4.0 + hits + 2 * math.sqrt(1 + hits)) / (4.0 + expected))

    def ratio(self):
        """ρ of the first depth."""
        kappa = (self.prior * self.optimism + self.accepted[0]) / (self.prior + self.after[0])
        return kappa * self.mean(0)

    def learn_from(self, rounds, live, decisions, verdicts):
        keep = (1 - 1 / self.memory) ** len(rounds)
        for sums in (self.accepted, self.after, self.before, self.drew, self.rows_then):
            sums[:] = [keep * x for x in sums]
        lately = (1 - 1 / 64) ** len(rounds)
        for sums in self.lately.values():
            sums[:] = [lately * x for x in sums]
        for depth, (before, after) in enumerate(zip(decisions, verdicts, strict=True)):
            drew = [each for each in rounds if each.submitted > depth]
            places = [live.index(each.row) for each in drew]
            self.accepted[depth] += sum(each.accepted > depth for each in drew)
            more = {
                "after": sum(after[row] for row in places),
                "before": sum(before[row] for row in places),
                "drew": len(drew),
                "rows_then": len(rounds) if drew else 0,
            }
            for name, value in more.items():
                getattr(self, name)[depth] += value
                self.lately[name][depth] += value
        steps = max([int(self.host.feeds), *(each.drafted for each in rounds)])
        submitted = [each.submitted for each in rounds]
        slots = self.host.block * blocks(self.host, len(rounds), sum(submitted))
        if self.host.verifies_padding:
            slots = len(rounds) * max(submitted, default=0)
        self.row_rounds = lately * self.row_rounds + len(rounds)
        self.emitted = lately * self.emitted + sum(each.accepted + 1 for each in rounds)
        self.steps = lately * self.steps + steps * len(rounds)
        self.verified_tokens = lately * self.verified_tokens + sum(each.submitted for each in rounds)
        self.slots = lately * self.slots + slots
        self.speculating = lately * self.speculating + len(rounds) * any(each.drafted for each in rounds)

    def state(self):
        totals = [self.row_rounds, self.emitted, self.steps, self.verified_tokens, self.slots, self.speculating]
        record = [[self.records[row][which] for row in sorted(self.records)] for which in (0, 1)]
        return {
            "past.sums": [self.accepted, self.after, self.before, self.drew, self.rows_then],
            "past.recent": list(self.lately.values()),
            "past.totals": totals,
            "past.record": record,
        }
