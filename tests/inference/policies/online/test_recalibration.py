"""Online recalibration against a dense solve written from its formulas, with true parameters and with hostile input."""

from __future__ import annotations

import inspect
import math
import re
import shutil

import numpy as np
import pytest
import torch

from accept_head import AcceptanceHead, InputError, Sampling
from accept_head.calibration import DepthCalibration
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.head_config import HeadConfig
from accept_head.inference import generate, make_policy
from accept_head.inference.adapters.vllm.host import PolicyHost, Verdict
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.recalibration import OnlineRecalibration
from accept_head.inference.policy import DraftStep
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.calibration import rounds_of
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.signals import draft_signals
from tests.inference.support.foreign import Engine
from tests.inference.support.made_up import make_sample
from tests.inference.support.rounds import outcome
from tests.inference.support.rules_by_hand import head_of, head_score
from tests.inference.support.toy import random_head, toy_pair

CPU = torch.device("cpu")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def begun(rows, depths, **options):
    made = OnlineRecalibration(depths, **options)
    made.start(rows, CPU)
    return made


def play(online, z, submitted, accepted, live=None, x=None, h=None):
    """One round of all rows. z: (rows, depths) logits of the head; x: (rows, depths, signals); h: (rows, depths, state)
    → (rows, depths) corrected probabilities."""
    online.start_round()
    seen, states = ([None] * np.shape(z)[1] if v is None else list(torch.from_numpy(v).unbind(1)) for v in (x, h))
    columns = [torch.as_tensor(column).float().sigmoid() for column in np.asarray(z).T]
    corrected = [online.judge(*token) for token in zip(columns, seen, states, strict=True)]
    online.observe(outcome(submitted, accepted, live))
    return torch.stack(corrected, dim=1)


# --- the fit ---------------------------------------------------------------------------------------------------------


class Reference:
    """One tenant: a dense matrix of (s − 1, u, v, b_1, …, b_K), tokens one by one. x: signals, then state."""

    def __init__(self, depths, signals, state, half_life, prior):
        size = 1 + signals + state + depths
        self.theta, self.pooled, self.box = np.zeros(size), np.zeros(size), np.array([math.log(4)] + [3.0] * (size - 1))
        self.last_layer = slice(1 + signals, 1 + signals + state)
        self.signals, self.half_life, self.prior = signals + state, half_life, prior
        self.labels, self.rounds = 0.0, 0
        self.matrix, self.right, self.new = np.zeros((size, size)), np.zeros(size), []

    def row(self, z, x, depth):
        made = np.zeros(len(self.theta))
        made[: 1 + self.signals], made[self.signals + depth] = [z, *x], 1.0
        return made

    @staticmethod
    def change(theta):
        return np.array([math.exp(theta[0]) - 1, *theta[1:]])

    def corrected(self, z, x, depth):
        return sigmoid(z + self.row(z, x, depth) @ self.change(self.pooled))

    def round(self, rows):
        """rows: (z and x of each drafted token, submitted, accepted) of each live row."""
        for tokens, submitted, accepted in rows:
            for depth, (z, x) in enumerate(tokens[:submitted], start=1):
                if depth <= accepted + 1:
                    self.new.append((z, self.row(z, x, depth), float(depth <= accepted)))
        self.rounds += 1
        if self.rounds % 20 == 0:
            self.step()

    def step(self):
        change, keep = self.change(self.theta), 2 ** (-20 / self.half_life)
        self.matrix, self.right, self.labels = keep * self.matrix, keep * self.right, keep * self.labels + len(self.new)
        for z, row, label in self.new:
            p = sigmoid(z + row @ change)
            self.matrix += p * (1 - p) * np.outer(row, row)
            self.right += p * (1 - p) * row * (row @ change) + (label - p) * row
        self.new = []
        best = np.linalg.solve(self.matrix + self.prior * np.eye(len(change)), self.right)
        target = np.array([math.log(max(1 + best[0], 0.25)), *best[1:]])
        self.theta = self.towards(self.theta, target)
        self.pooled = self.towards(self.pooled, min(self.labels, 200) / 200 * self.theta)

    def towards(self, theta, target):
        moved = np.clip(theta + np.clip(target - theta, -0.25, 0.25), -self.box, self.box)
        v, wanted = theta[self.last_layer], target[self.last_layer]
        if len(v):
            wanted = wanted / max(1, np.linalg.norm(wanted) / 8)
            moved[self.last_layer] = v + 0.25 * (wanted - v)
        return moved


@pytest.mark.parametrize(("signals", "state"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_every_step_is_that_of_a_dense_solve(signals, state):
    random = np.random.default_rng(0)
    rows, depths = 5, 4
    normal = ([1.0, -2.0][:signals], [2.0, 0.5][:signals])
    online = begun(rows, depths, half_life=70, prior=2.0, signals=normal, state=state)
    reference = Reference(depths, signals, state, 70, 2.0)
    seen = [reference.pooled.copy()]
    for number in range(1, 201):
        z, x = random.normal(0.5, 2, size=(rows, depths)).clip(-15, 15), random.normal(size=(rows, depths, signals))
        raw = np.array(normal[0]) + np.array(normal[1]) * x
        h = random.normal(size=(rows, depths, state))
        h /= np.linalg.norm(h, axis=-1, keepdims=True)
        deepest = random.integers(1, depths + 1)  # no row drafts more in this round
        submitted = random.integers(0, deepest + 1, size=rows)
        passed = random.random(z.shape) < sigmoid(0.5 * z + 1 + x.sum(-1) + 4 * h.sum(-1))
        accepted = np.minimum(submitted, np.cumprod(passed, axis=1).sum(1))
        live = random.random(rows) < 0.9
        shown = z[:, :deepest].copy()
        shown[~live] = float("nan")  # idle rows hold garbage
        inputs = {"x": raw[:, :deepest] if signals else None, "h": h[:, :deepest] if state else None}
        predicted = play(online, shown, submitted, accepted, live, **inputs)
        exact = np.log(p := torch.from_numpy(z).float().sigmoid().double().numpy()) - np.log1p(-p)
        tokens = [list(zip(exact[row], np.concatenate([x, h], -1)[row], strict=True)) for row in range(rows)]
        for row in np.where(live)[0]:
            expected = [reference.corrected(*tokens[row][d], d + 1) for d in range(deepest)]
            assert predicted[row].tolist() == pytest.approx(expected, abs=1e-5)
        reference.round([(tokens[row], submitted[row], accepted[row]) for row in np.where(live)[0]])
        assert online.pooled.numpy() == pytest.approx(reference.pooled, rel=1e-3, abs=1e-4)
        if number % 20 == 0:
            seen.append(reference.pooled.copy())
    assert (np.abs(np.diff(seen, axis=0)).max(0) > 0.02).all(), "the reference is worth nothing if nothing moves"


SLOPE, INTERCEPTS = 0.6, np.array([0.5, 0.0, -0.5, -1.0])


def labels(random, z, slope=SLOPE, intercepts=INTERCEPTS):
    passed = random.random(z.shape) < sigmoid(slope * z + intercepts)
    submitted = random.integers(0, z.shape[1] + 1, size=len(z))
    return submitted, np.minimum(np.cumprod(passed, axis=1).sum(1), submitted)


def learn(rounds=300, rows=64, **truth):
    """Labels from known parameters: each token is accepted with its probability if the one before it was."""
    random = np.random.default_rng(1)
    online = begun(rows, 4, half_life=200)
    for _ in range(rounds):
        z = random.normal(1, 1.5, size=(rows, 4))
        play(online, z, *labels(random, z, **truth))
    return online


def error(online):
    return np.abs(online.pooled.numpy() - [math.log(SLOPE), *INTERCEPTS])


def test_it_finds_the_slope_and_intercepts_that_made_the_labels():
    """Standard errors are 0.01 to 0.06 (1 / √(Fisher information) at 300 rounds of 64 rows): 5 of them."""
    assert (error(learn()) < [0.06, 0.1, 0.1, 0.15, 0.3]).all()


def test_it_stays_where_the_head_is_right():
    online = learn(slope=1.0, intercepts=np.zeros(4))
    assert np.abs(online.pooled.numpy()).max() < 0.15


def states(random, shape, channels=5):
    h = random.normal(size=(*shape, channels))
    return h / np.linalg.norm(h, axis=-1, keepdims=True)


def learn_last_layer(v, rounds=600, **options):
    """Labels of a head whose last layer lacks v."""
    random, v = np.random.default_rng(6), np.asarray(v)
    online = begun(64, 4, half_life=200, state=len(v), **options)
    for _ in range(rounds):
        z, h = random.normal(1, 1.5, size=(64, 4)), states(random, (64, 4), len(v))
        submitted, accepted = labels(random, z + h @ v, slope=1.0, intercepts=np.zeros(4))
        play(online, z, submitted, accepted, h=h)
    return online


def last_layer(online):
    """v of the pooled θ."""
    return online.pooled[online.signals : online.shared]


def test_it_finds_what_the_last_layer_lacks():
    """Standard errors are about 0.07: half-lives of 200 rounds of 64 rows, ‖h‖ = 1 over 5 channels."""
    truth = np.array([3.0, -2.0, 0.0, 1.0, -4.0])
    online = learn_last_layer(truth)
    assert np.abs(last_layer(online).numpy() - truth).max() < 0.5
    assert np.abs(online.pooled.numpy()[[0, 6, 7]]).max() < 0.15, "the rest of the head is right"


def test_no_last_layer_is_longer_than_its_bound_and_none_where_the_head_is_right():
    assert last_layer(learn_last_layer(np.zeros(5))).norm() < 0.5
    assert last_layer(learn_last_layer(np.full(5, 20.0), prior=0.1)).norm() <= OnlineRecalibration.MOST_STATE + 1e-4


def test_it_follows_a_drift_within_a_few_half_lives():
    random = np.random.default_rng(2)
    online = learn(slope=1.0, intercepts=np.full(4, 1.0))
    assert online.pooled[1] > 0.8
    for _ in range(800):
        z = random.normal(1, 1.5, size=(64, 4))
        play(online, z, *labels(random, z, slope=1.0, intercepts=np.full(4, -1.0)))
    assert online.pooled[1] < -0.8


def test_what_is_not_seen_any_more_is_forgotten():
    online = learn(intercepts=np.full(4, -1.0))
    assert online.pooled[4] < -0.5
    online.start(1, CPU)
    for _ in range(2000):  # only first tokens
        play(online, np.zeros((1, 1)), [1], [0])
    assert abs(float(online.pooled[4])) < 0.1


# --- off, frozen, bounded --------------------------------------------------------------------------------------------


def test_with_an_infinite_prior_it_is_the_head_itself():
    random = np.random.default_rng(3)
    online = begun(4, 3, prior=math.inf)
    for _ in range(100):
        z = random.normal(0, 2, size=(4, 3))
        assert play(online, z, [3] * 4, [0] * 4).numpy() == pytest.approx(sigmoid(z), abs=1e-6)
    assert online.pooled.abs().max() == 0


def test_frozen_it_does_not_move_and_goes_on_when_it_is_thawed():
    online = learn(rounds=100)
    online.learning, before = False, online.pooled.clone()
    for _ in range(60):
        play(online, np.ones((64, 4)), [4] * 64, [0] * 64)
    assert torch.equal(online.pooled, before)
    online.learning = True
    for _ in range(60):
        play(online, np.ones((64, 4)), [4] * 64, [0] * 64)
    assert online.pooled[1] < before[1] - 0.3


@pytest.mark.parametrize("accepted", [0, 4])
@pytest.mark.parametrize("z", [-40.0, 0.0, 40.0])
def test_no_step_and_no_value_is_beyond_its_bound(accepted, z):
    online = begun(64, 4, prior=0.0, half_life=math.inf)
    online.INTERVAL = 2
    for _ in range(120):
        before = online.pooled.clone()
        corrected = play(online, np.full((64, 4), z), [4] * 64, [accepted] * 64)
        assert corrected.isfinite().all() and (online.pooled - before).abs().max() <= online.STEP + 1e-12
    assert (online.pooled.abs() <= online.box + 1e-12).all()


def test_what_was_learnt_outlives_start_and_can_be_kept_as_a_calibration(tmp_path):
    online = learn(rounds=200)
    before = online.pooled.clone()
    online.start(3, CPU)
    assert torch.equal(online.pooled, before)
    online.learnt().save(tmp_path)
    kept, online.learning = DepthCalibration.load(tmp_path), False
    z = np.linspace(-3, 3, 12).reshape(3, 4)
    expected = torch.stack([kept(d + 1, torch.from_numpy(z[:, d]).sigmoid()) for d in range(4)], dim=1)
    assert play(online, z, [0] * 3, [0] * 3).numpy() == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"half_life": 0.0}, "half_life"), ({"prior": -1.0}, "prior"), ({"tenant_share": 0.0}, "tenant_share"),
     ({"tenant_share": 1.5}, "tenant_share"), ({"half_life": math.nan}, "half_life")],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(options, word):
    with pytest.raises(InputError, match=word):
        OnlineRecalibration(4, **options)


# --- tenants ---------------------------------------------------------------------------------------------------------


def attacked(attack, *, tenant_share=0.2, honest=3, rounds=240, state=0, **options):
    """(with, without) pooled parameters after each round: three honest tenants of one row each, and one with 29 rows
    whose labels, and logits, are the attack's."""
    pooled = []
    for present in (True, False):
        random = np.random.default_rng(4)
        online = OnlineRecalibration(3, tenant_share=tenant_share, half_life=100, state=state, **options)
        online.start(32, CPU)
        online.set_tenants(torch.arange(32), [str(min(row, honest)) for row in range(32)])
        path = []
        for _ in range(rounds):
            z = random.normal(1, 1, size=(32, 3))
            submitted, accepted = labels(random, z, slope=1.0, intercepts=np.array([0.3, 0.0, -0.3]))
            z[honest:], submitted[honest:], accepted[honest:] = attack
            h = states(random, z.shape, state) if state else None
            if state:
                h[honest:] = np.eye(state)[0]  # always the same state, so that v has to answer for it
            play(online, z, submitted, accepted, live=(np.arange(32) < honest) | present, h=h)
            path.append(online.pooled.numpy().copy())
        pooled.append(np.array(path))
    return pooled


ATTACKS = {
    "all rejected": (3.0, 3, 0),
    "all accepted": (-3.0, 3, 3),
    "sure and rejected": (16.0, 1, 0),
    "only deep ones rejected": (2.0, 3, 2),
}
BOX = np.array([math.log(4), 3.0, 3.0, 3.0])


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("tenant_share", [0.05, 0.2])
def test_one_tenant_moves_the_pooled_correction_no_further_than_stated(attack, tenant_share):
    present, absent = attacked(ATTACKS[attack], tenant_share=tenant_share)
    assert (np.abs(present - absent) <= 2 * tenant_share * BOX + 1e-9).all()


@pytest.mark.parametrize("attack", ATTACKS)
def test_nor_does_one_tenant_move_the_last_layer_further_than_stated(attack):
    present, absent = (path[:, 1:5] for path in attacked(ATTACKS[attack], state=4, prior=0.1))
    moved = np.linalg.norm(present - absent, axis=-1)
    assert moved.max() > 0.01 and (moved <= 2 * 0.2 * OnlineRecalibration.MOST_STATE + 1e-9).all()


def test_an_attack_alone_moves_it_by_its_share_only():
    online = begun(8, 3, tenant_share=0.1)
    online.set_tenants(torch.arange(8), ["eve"] * 8)
    for _ in range(500):
        play(online, np.full((8, 3), 3.0), [3] * 8, [0] * 8)
    assert (np.abs(online.pooled.numpy()) <= 0.1 * BOX + 1e-9).all() and online.pooled[1] < -0.03


def test_per_tenant_nobody_moves_anybody_else():
    random, online = np.random.default_rng(5), begun(4, 3, per_tenant=True)
    online.set_tenants(torch.arange(4), ["a", "a", "eve", "eve"])
    for _ in range(300):
        z = random.normal(1, 1, size=(4, 3))
        submitted, accepted = labels(random, z, slope=1.0, intercepts=np.zeros(3))
        accepted[2:] = 0
        corrected = play(online, z, submitted, accepted)
    assert np.abs(corrected[:2].numpy() - sigmoid(z[:2])).max() < 0.15
    assert corrected[2:, 0].max() < 0.2


def test_tenants_go_with_their_rows_and_admission_makes_rows_anonymous():
    online = begun(3, 2)
    online.set_tenants(torch.tensor([0, 2]), ["a", "b"])
    a, b = online.places["a"], online.places["b"]
    assert online.tenants.tolist() == [a, 0, b] and a != b != 0
    online.select(torch.tensor([2, 0, 0, 1]))
    assert online.tenants.tolist() == [b, a, a, 0]
    online.admit(torch.tensor([1]))
    assert online.tenants.tolist() == [b, 0, a, 0]
    online.set_tenants(torch.tensor([3]), ["a"])
    assert online.tenants.tolist() == [b, 0, a, a]


def test_rows_that_change_places_within_a_round_keep_what_they_were_judged_by():
    """As when a host compacts its rows after drafting."""
    z, order = np.array([[2.0, 1.0], [-1.0, 0.5], [0.0, -2.0]]), [2, 0]
    moved, plain = begun(3, 2), begun(2, 2)
    for online, shown in ((moved, z), (plain, z[order])):
        online.start_round()
        for column in shown.T:
            online.judge(torch.from_numpy(column).sigmoid())
    moved.select(torch.tensor(order))
    for online in (moved, plain):
        online.observe(outcome([2, 2], [1, 2]))
        online._sum_up()
    assert moved.fresh.gram.any()
    assert all(torch.allclose(*parts) for parts in zip(moved.fresh, plain.fresh, strict=True))


def test_the_tenant_named_longest_ago_makes_room():
    online = begun(1, 2)
    row = torch.tensor([0])
    for number in range(online.TENANTS - 1):
        online.set_tenants(row, [str(number)])
    online.own[online.places["0"]] = online.own[online.places["1"]] = 1.0
    online.set_tenants(row, ["0"])
    kept, freed = online.places["0"], online.places["1"]
    online.set_tenants(row, ["new"])
    assert online.places["new"] == freed and "1" not in online.places and not online.own[freed].any()
    assert online.own[kept].all()


# --- as a policy -----------------------------------------------------------------------------------------------------


def test_it_has_all_options_of_the_head():
    options = {name for name, one in inspect.signature(HeadPolicy).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert options <= set(inspect.signature(RecalibratedHeadPolicy).parameters)


@pytest.mark.parametrize("config", [{"reads": "before", "signals": True}, {"lag": 0}, {"lag": 1}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_with_an_infinite_prior_it_drafts_what_the_head_drafts(folder, config, batch):
    lag = config.get("lag")
    head = head_of(**{name: value for name, value in config.items() if name != "lag"})
    traces = make_sample(3, responses=30, max_new_tokens=40).couple(folder)
    plain = replay(traces, HeadPolicy(head, 0.6, k_max=5, lag=lag), "plain", batch=batch)
    online = RecalibratedHeadPolicy(head, 0.6, k_max=5, lag=lag, online=True, prior=math.inf)
    assert (replay(traces, online, "online", batch=batch).counts == plain.counts).all()
    assert online.recalibration.rounds > 20 and online.recalibration.sums.gram.any()
    moved = RecalibratedHeadPolicy(head, 0.6, k_max=5, lag=lag, online=True, prior=0.1)
    moved.recalibration.INTERVAL = 5
    assert (replay(traces, moved, "online", batch=batch).counts != plain.counts).any()


@pytest.mark.parametrize("width", [16, 300])
def test_what_it_learns_of_is_the_state_that_the_last_layer_reads(width):
    head = AcceptanceHead(HeadConfig(hidden_size=8, width=width, depth=2, reads="before"))
    torch.nn.init.normal_(head.blocks[1].linear.weight)
    policy = RecalibratedHeadPolicy(head, 0.5, online=True)
    seen, hidden = [], torch.randn(6, 8)
    hook = head.output.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    logits = head(hidden)[..., 0]
    hook.remove()
    p = policy.score(DraftStep(depth=1, token_ids=torch.zeros(6).long(), active=torch.ones(6) > 0, fed_hidden=hidden))
    assert torch.allclose(p, logits.sigmoid(), atol=1e-5)
    unit = seen[0] / seen[0].norm(dim=-1, keepdim=True)
    if width == 16:
        assert torch.allclose(policy.state, unit, atol=1e-5)
    else:  # projected: angles are kept as well as 256 of 300 directions can
        assert policy.state.shape == (6, 256) and torch.allclose(policy.state.norm(dim=-1), torch.ones(6), atol=1e-5)
        assert (policy.state @ policy.state.t() - unit @ unit.t()).abs().max() < 0.2
    assert policy.recalibration.state == min(width, 256)


def test_the_fast_replay_which_knows_no_depth_refuses_it(folder):
    policy = RecalibratedHeadPolicy(head_of(reads="before", signals=True), 0.6, k_max=5, online=True)
    with pytest.raises(InputError, match=r"asking\.replay"):
        replay_thresholds(make_sample(3).couple(folder), policy, [Setting(threshold=0.6, k_max=5)], "online")


def test_it_goes_through_the_batchs_end_by_costs(folder):
    """What the wrapper multiplies up is the corrected probability, and verdicts reach the policy inside."""
    head = head_of(reads="before", signals=True)
    traces = make_sample(3, responses=30, max_new_tokens=40).couple(folder)
    inside = RecalibratedHeadPolicy(head, 1.0, k_max=5, online=True)
    costs = PairCosts.constant(ForwardCosts(t_draft=0.1, t_target=1.0))
    replay(traces, BatchStopPolicy(inside, costs), "both", batch=3)
    assert inside.recalibration.pooled.abs().max() > 0.05


def test_in_a_foreign_loop_requests_come_and_go_and_verdicts_reach_the_right_ones():
    """vLLM's host: the verdict comes with the next round, whose rows are others."""
    head = random_head(16, reads="before", signals=True)
    policy = RecalibratedHeadPolicy(head, 1.0, k_max=3, online=True)
    host = PolicyHost(policy, rows=4, limit=3, device=CPU, greedy=False)
    engine, online = Engine(3, 3, seed=0), policy.recalibration
    engine.round(host, ["a", "b", "c"])
    online.set_tenants(torch.arange(3), ["a", "b", "c"])
    signals = [draft_signals(engine.q[d], engine.ids[d]) for d in range(3)]
    p = torch.stack([head.probability(engine.hidden[d], signals=signals[d]) for d in range(3)], dim=1).detach()
    verdict = Verdict(submitted=torch.tensor([3, 3]), accepted=torch.tensor([3, 1]))  # of c and a; b is gone
    Engine(2, 3, seed=1).round(host, ["c", "a"], verdict=verdict)
    online._sum_up()
    label, judged = {"a": [1.0, 0.0], "b": [], "c": [1.0, 1.0, 1.0]}, online.fresh.labels
    for row, name in enumerate("abc"):
        place = online.places[name]
        assert judged[place] == len(label[name])
        for d, y in enumerate(label[name]):
            assert float(online.fresh.right[place, d]) == pytest.approx(y - float(p[row, d]), abs=1e-5)
    assert online.tenants.tolist() == [online.places["c"], online.places["a"]]


def test_greedy_text_is_the_same_with_it():
    """Lossless, with rows that are admitted and moved while it learns."""
    pair = toy_pair()
    prompts = [[1, 2, 3], [4], [0, 1], [2, 2, 2, 1], [3, 3]]
    head = random_head(16, reads="before", signals=True)
    texts = [
        generate(pair.target, pair.draft, prompts, policy=policy, sampling=Sampling(temperature=0),
                 max_new_tokens=40, batch_size=3, tokenizer=None)[0]
        for policy in ("none", RecalibratedHeadPolicy(head, 0.8, k_max=4, online=True))
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_a_calibration_is_applied_by_depth_and_before_what_is_learnt():
    calibration = DepthCalibration(method="affine", slopes=(1.0, 0.5), intercepts=(0.0, 1.0))
    policy = RecalibratedHeadPolicy(random_head(4), 0.9, calibration=calibration, online=True)
    policy.start(2, CPU)
    policy.start_round(torch.ones(2).bool())
    score = torch.tensor([0.3, 0.9])
    for _ in range(3):
        policy.state = torch.zeros(2, 4)
        policy._add(score)
    z = torch.logit(score)
    expected = [score, torch.sigmoid(0.5 * z + 1), torch.sigmoid(0.5 * z + 1)]
    assert torch.stack(policy.predicted).numpy() == pytest.approx(torch.stack(expected).numpy(), abs=1e-6)
    assert policy.running.numpy() == pytest.approx(torch.stack(expected).prod(0).numpy(), abs=1e-6)
    seen = torch.stack([token.z for token in policy.recalibration.tokens[1:]])
    assert seen.numpy() == pytest.approx((0.5 * z + 1).expand(2, 2).numpy(), abs=1e-4)


# --- by its SPEC -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    random_head(16, reads="before").save_pretrained(tmp_path)
    (tmp_path / "decoding.json").write_text('{"threshold": 0.7, "k_max": 6}')
    return tmp_path


def test_a_spec_turns_it_on_with_its_options(saved):
    draft = toy_pair().draft
    assert type(make_policy(f"head:{saved}:0.5", draft)) is HeadPolicy
    assert type(make_policy(f"head:{saved}:0.5,online=false", draft)) is HeadPolicy
    policy = make_policy(f"head:{saved},online=true,half_life=50,tenant_share=0.1,per_tenant=true,k_max=5", draft)
    assert type(policy) is RecalibratedHeadPolicy and (policy.threshold, policy.max_draft_tokens) == (0.7, 5)
    online = policy.recalibration
    assert (online.half_life, online.tenant_share, online.per_tenant) == (50.0, 0.1, True)
    DepthCalibration(method="affine", slopes=(0.5,), intercepts=(0.0,)).save(saved)
    policy = make_policy(f"head:{saved}:0.5,calibration=true", draft)
    assert policy.calibration.slopes == (0.5,) and policy.recalibration is None
    inside = make_policy(f"head:{saved}:1,online=true,costs=0.1", draft).policy
    assert type(inside) is RecalibratedHeadPolicy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("calibration=true", "calibration.json: no such file"),
        ("half_life=50", "half_life is of online=true"),
        ("train=true", "train is of online=true"),
        ("calibration=true,tenant_share=7", "tenant_share is of online=true"),
        ("online=true,tenant_share=2", "tenant_share is 2"),
        ("online=maybe", "true or false"),
    ],
)
def test_a_wrong_option_is_refused_by_name(saved, options, words):
    with pytest.raises(InputError, match=re.escape(words)):
        make_policy(f"head:{saved}:0.5,{options}", toy_pair().draft)


# --- the rounds that a calibration is fitted on ----------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"reads": "before", "signals": True}, {}], ids=str)
def test_rounds_are_those_of_a_walk_token_by_token(folder, config):
    head, sample = head_of(**config), make_sample(8, responses=6, k_max=6)
    rounds = rounds_of(sample.couple(folder), HeadPolicy(head, 0.5))
    score, row, depths = head_score(head, "fed" if config else "drawn"), 0, 5
    for response, record in enumerate(sample.records):
        place = 0
        while place < len(record["response_ids"]):
            tokens = sample.round(response, place, 6)
            accepted = next((d for d, token in enumerate(tokens) if not token.accepted), len(tokens))
            for d in range(depths):
                assert rounds.drafted[row, d] == (d < len(tokens))
                assert rounds.at_risk[row, d] == (d < len(tokens) and d <= accepted)
                if rounds.at_risk[row, d]:
                    assert rounds.acceptance[row, d] == pytest.approx(record["acceptance"][place + d])
                if rounds.drafted[row, d] and (config or tokens[d].drawn is not None):
                    assert rounds.predicted[row, d] == pytest.approx(score(tokens[d]), abs=1e-5)
            place, row = place + accepted + 1, row + 1
    assert row == len(rounds.predicted)


def test_calibrate_writes_what_a_spec_reads(run_warm, random_traces_folder, random_pair_folder, tmp_path):
    head = tmp_path / "head"
    random_head(16, reads="before").save_pretrained(head)
    traces = shutil.copytree(random_traces_folder, tmp_path / "traces")  # the rollouts are written beside them
    options = ("--traces", traces, "--draft", random_pair_folder / "draft", "--head", head)
    done = run_warm("calibrate", *options)
    assert done.returncode == 0, done.stderr
    assert "calibration=true" in done.stdout and DepthCalibration.load(head).method == "temperature"
