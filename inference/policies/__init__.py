"""Stopping policies, one idea a file; `specs` builds them by name."""

from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy
from accept_head.inference.policies.specs import POLICIES, make_policy
from accept_head.inference.policies.svip import SvipPolicy

__all__ = [
    "POLICIES",
    "AdaEdlPolicy",
    "AdaSpecPolicy",
    "BanditPolicy",
    "BatchMapPolicy",
    "BatchStopPolicy",
    "BudgetPolicy",
    "ConfidencePolicy",
    "CumulativeConfidencePolicy",
    "DsdePolicy",
    "EntropyPolicy",
    "FixedPolicy",
    "GoodputPolicy",
    "HeadPolicy",
    "HfConfidencePolicy",
    "HfHeuristicPolicy",
    "LeviathanPolicy",
    "MaxProbPolicy",
    "MeanMaxProbPolicy",
    "OnlineLogisticPolicy",
    "OnlineSignalsPolicy",
    "RecalibratedHeadPolicy",
    "SvipPolicy",
    "make_policy",
]
