"""A token whose score equals the threshold: both methods of replay continue the round."""

from __future__ import annotations

import numpy as np

from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from tests.inference.support.made_up import make_sample
from tests.inference.support.rules_by_hand import assert_same


def test_a_token_that_scores_the_threshold_goes_on(folder):
    traces = make_sample(5, responses=30).couple(folder)
    first = traces.max_prob[traces.starts[traces.drafts[traces.starts] > 1]]  # each begins a round that could go on
    at = first.median().numpy()
    above = np.nextafter(at, np.float32(2))
    settings = [Setting(threshold=float(threshold), k_max=6) for threshold in (at, above)]
    fast = replay_thresholds(traces, MaxProbPolicy(0.5), settings, "max-prob")
    for setting, one in zip(settings, fast, strict=True):
        assert_same(one, replay(traces, MaxProbPolicy(setting.threshold, k_max=6), "max-prob"))
    assert fast[0].draft_lengths.tolist() != fast[1].draft_lengths.tolist(), "it makes a difference"
