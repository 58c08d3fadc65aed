"""Question: do the tests notice when the product is broken on purpose?

A mutant is one line of the product that says something else, and the tests that have to fail then. The commit that is
checked out is copied to a temporary folder. There all of these tests run as they are, and must pass; then one mutant
after the other is put in, and its own tests run.

    python benchmarks/mutants.py                   all of them, and results/mutants.json
    python benchmarks/mutants.py --only adaspec    those whose names hold this word; nothing is written

It ends with status 1 if a mutant is not caught. A mutant whose text is not in its file exactly once is out of date: the
script names it and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from record import REPOSITORY, write_result

PASSED, FAILED = 0, 1  # exit statuses of pytest
TIMEOUT = 150  # seconds a test: what has been broken may never end


class Mutant(NamedTuple):
    """name: what is broken. file: of the product. text: as it is there, once; becomes: what it is replaced by. tests:
    node ids, in tests/, at least one of which must fail."""

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]


def lossless(policy: str) -> str:
    """The enumeration of docs/lossless.md, of one policy."""
    return f"inference/policies/test_lossless.py::test_a_policy_is_lossless_under_both_verifiers[{policy}]"


def rule(policy: str) -> str:
    """The policy against its rule in scalars."""
    return f"inference/policies/test_rules.py::test_a_policy_drafts_what_its_rule_says[{policy}]"


# --- one or more for every policy of the table in docs/lossless.md ---------------------------------------------------

THRESHOLD = "inference/policies/test_threshold.py::test_"
COSTS = "inference/policies/test_cost_rules.py::test_"
RECALIBRATION = "inference/policies/online/test_recalibration.py::test_"
TRAINING = "inference/policies/online/test_training.py::test_"
MEMORY = "inference/policies/online/test_memory.py::test_"
BATCH_STOP = "inference/policies/test_batch_stop.py::test_"

POLICIES = (
    Mutant(
        "fixed: one token more than it is told",
        "inference/policies/fixed.py",
        "self.max_draft_tokens = k",
        "self.max_draft_tokens = k + 1",
        ("inference/policies/test_specs.py::test_none_and_fixed_draft_k_tokens",),
    ),
    Mutant(
        "leviathan: tokens after a rejection count as rejected, too",
        "inference/policies/leviathan.py",
        "self.judged + outcome.judged * live",
        "self.judged + outcome.drafted * live",
        (rule("leviathan"),),
    ),
    Mutant(
        "leviathan: a row's rounds without drafts stay where they were when rows move",
        "inference/policies/leviathan.py",
        "self.judged[rows], self.idle[rows]\n\n    def start_round",
        "self.judged[rows], self.idle\n\n    def start_round",
        (rule("leviathan"),),
    ),
    Mutant(
        "hf-heuristic: it may go down to 0",
        "inference/policies/hf_heuristic.py",
        ".clamp(1, self.max_draft_tokens)",
        ".clamp(0, self.max_draft_tokens)",
        (rule("hf-heuristic"),),
    ),
    Mutant(
        "hf-confidence: it learns of tokens after a rejection",
        "inference/policies/hf_confidence.py",
        "slots < outcome.judged[:, None]",
        "slots < outcome.submitted[:, None]",
        (rule("hf-confidence"),),
    ),
    Mutant(
        "confidence: log q in place of q",
        "inference/policies/confidence.py",
        "return step.logprob.exp()",
        "return 1 + step.logprob",
        (rule("confidence:0.3"),),
    ),
    Mutant(
        "cumulative-confidence: the least q in place of the product",
        "inference/policies/cumulative_confidence.py",
        'statistic = "product"',
        'statistic = "minimum"',
        (rule("cumulative-confidence:0.2"),),
    ),
    Mutant(
        "max-prob: max q squared",
        "inference/policies/max_prob.py",
        "return step.max_prob\n",
        "return step.max_prob.square()\n",
        (rule("max-prob:0.4"),),
    ),
    Mutant(
        "max-prob-mean: rows that have stopped are part of the mean",
        "inference/policies/max_prob.py",
        "torch.where(step.active, step.max_prob, 0.0).sum()",
        "step.max_prob.sum()",
        (rule("max-prob-mean"),),
    ),
    Mutant(
        "entropy: the comparison turned round",
        "inference/policies/entropy.py",
        "return -step.entropy",
        "return step.entropy - 2 * 0.6",
        (rule("entropy:0.5"),),
    ),
    Mutant(
        "svip: another constant",
        "inference/policies/svip.py",
        "SCALE = 0.15",
        "SCALE = 0.2",
        (rule("svip:0.25"),),
    ),
    Mutant(
        "adaedl: what was drafted in place of what might have been",
        "inference/policies/adaedl.py",
        "full = outcome.accepted == self.max_draft_tokens",
        "full = outcome.accepted == outcome.drafted",
        (rule("adaedl"),),
    ),
    Mutant(
        "adaedl: acceptance rates stay where they were when rows move",
        "inference/policies/adaedl.py",
        "self.levels[rows], self.rates[rows]\n\n    def draw_next",
        "self.levels[rows], self.rates\n\n    def draw_next",
        (rule("adaedl"),),
    ),
    Mutant(
        "online-logistic: k_min off by one",
        "inference/policies/online/logistic.py",
        "if step.depth < self.k_min",
        "if step.depth <= self.k_min",
        (rule("online-logistic"),),
    ),
    Mutant(
        "online-logistic: the first rejected token is labelled accepted",
        "inference/policies/online/estimator.py",
        "label = (depths < accepted[:, None])",
        "label = (depths <= accepted[:, None])",
        ("inference/policies/online/test_estimator.py::test_every_step_is_that_of_a_dense_newton_solve",),
    ),
    Mutant(
        "dsde: one round of calibration more",
        "inference/policies/dsde.py",
        "self.rounds < self.calibration",
        "self.rounds <= self.calibration",
        (rule("dsde"),),
    ),
    Mutant(
        "dsde: the largest divergence is neither forgotten nor moved with its row",
        "inference/policies/dsde.py",
        '"count", "peak", "draft")',
        '"count", "draft")',
        (rule("dsde"),),
    ),
    Mutant(
        "bandit: rewards are on the scale of the last round",
        "inference/policies/bandit.py",
        "self.top = torch.maximum(self.top, reward)",
        "self.top = torch.where(reward > 0, reward, self.top)",
        (rule("bandit"),),
    ),
    Mutant(
        "batch-map: a row of the table begins one batch size late",
        "inference/policies/batch_map.py",
        "right=True",
        "right=False",
        ("inference/policies/test_batch_map.py::test_the_policy_drafts_what_vllm_drafts_at_every_batch_size",),
    ),
    Mutant(
        "goodput: tokens after a rejection count as rejected, too",
        "inference/policies/goodput.py",
        "for count in (outcome.judged, outcome.accepted)",
        "for count in (outcome.submitted, outcome.accepted)",
        (rule("goodput"),),
    ),
    Mutant(
        "adaspec: what is dropped depends on the token drawn there",
        "inference/policies/adaspec.py",
        "self.before.append(self.s * step.max_prob)",
        "self.before.append(self.s * step.logprob.exp())",
        (lossless("adaspec"),),
    ),
    Mutant(
        "adaspec: what is dropped depends on tokens drawn later",
        "inference/policies/adaspec.py",
        ">= self.least)).long()",
        ">= self.least * self.goodput / self.last.clamp(min=1e-3))).long()",
        (lossless("adaspec"),),
    ),
    Mutant(
        "budget: what is dropped depends on the token drawn there",
        "inference/policies/budget.py",
        "p = self.estimator.predict(step)",
        "p = self.estimator.predict(step) / (1 + step.token_ids)",
        (lossless("budget"),),
    ),
    Mutant(
        "budget: depths are counted from the deepest on",
        "inference/policies/budget.py",
        "torch.where(real, survivals, -1.0).T.flatten()",
        "torch.where(real, survivals, -1.0).T.flip(0).flatten()",
        (COSTS + "equal_survivals_are_taken_depth_by_depth",),
    ),
    Mutant(
        "head, lag 0: the threshold is one of acceptance, not of rejection",
        "inference/policies/head.py",
        "return 1 - threshold",
        "return threshold",
        (THRESHOLD + "a_head_stops_by_its_product_at_either_lag",),
    ),
    Mutant(
        "head, lag 1: the state at one token with the signals of the next",
        "inference/policies/head.py",
        "replace(earlier, drawn_hidden=step.fed_hidden)",
        "replace(step, drawn_hidden=step.fed_hidden)",
        ("inference/decode/test_loop.py::test_the_head_policy_follows_the_product_rule",),
    ),
    Mutant(
        "head that reads before: it waits for the state at the token",
        "inference/policies/head.py",
        "self.lag = lag if lag is not None else 0 if before else 1",
        "self.lag = lag if lag is not None else 1",
        ("inference/policies/test_specs.py::test_a_head_that_reads_before_has_no_lag_unless_told_0",),
    ),
    Mutant(
        "head that is a base alone: its offset is left out",
        "accept_head/head/scorer.py",
        "offset = offset + head.base.bias.detach()",
        "offset = offset + 0 * head.base.bias.detach()",
        ("accept_head/test_base.py::test_serving_scores_are_the_probabilities",),
    ),
    Mutant(
        "online-signals: it does not begin at q",
        "inference/policies/online/signals.py",
        "head.base.bias.fill_(MEAN[place])",
        "head.base.bias.fill_(0.0)",
        (rule("online-signals:0.4"),),
    ),
    Mutant(
        "head, `online=true`: the first rejected token is labelled accepted",
        "inference/policy.py",
        "< self.accepted[:, None]).float()",
        "<= self.accepted[:, None]).float()",
        (RECALIBRATION + "every_step_is_that_of_a_dense_solve",),
    ),
    Mutant(
        "head, `online=true`: nothing is forgotten",
        "inference/policies/online/recalibration.py",
        "remembered = 2 ** (-self.INTERVAL / self.half_life)",
        "remembered = 1.0",
        (RECALIBRATION + "every_step_is_that_of_a_dense_solve",),
    ),
    Mutant(
        "head, `online=true`: rows that move leave their tenants behind",
        "inference/policies/online/recalibration.py",
        "self.tenants = self.tenants[rows]",
        "self.tenants = self.tenants[: len(rows)]",
        (RECALIBRATION + "tenants_go_with_their_rows_and_admission_makes_rows_anonymous",),
    ),
    Mutant(
        "head, `online=true,train=true`: a token after the rejected one is remembered as judged",
        "inference/policies/online/training.py",
        "(depth < judged) & labels",
        "(depth <= judged) & labels",
        (MEMORY + "of_outcomes_alone_the_first_rejected_token_is_the_last_that_is_learnt",),
    ),
    Mutant(
        "head, `online=true,train=true`: a place in the memory that is taken again keeps its verdict",
        "inference/policies/online/training.py",
        "memory.weight[here] = 0.0\n",
        "memory.weight[here, 1:] = 0.0\n",
        (MEMORY + "a_place_that_is_taken_again_by_tokens_without_a_verdict_is_empty",),
    ),
    Mutant(
        "head, `online=true,train=true`: decisions are made by the last step, not by the average",
        "inference/policies/online/training.py",
        "own.lerp_(learnt, self.AVERAGE)",
        "own.lerp_(learnt, 1.0)",
        (TRAINING + "decisions_are_made_by_the_average_of_the_steps_and_the_given_head_stays",),
    ),
    Mutant(
        "head, `costs=`: the price of a step is that of all rows, also of idle ones",
        "inference/policies/batch_stop.py",
        "rows, context = int(takes_part.sum()), float(self.lengths @ takes_part)",
        "rows, context = len(takes_part), float(self.lengths.sum())",
        (rule("Told by costs, light"),),
    ),
    Mutant(
        "head, `costs=`: a head that feeds the token to judge it is not charged for that",
        "inference/policies/batch_stop.py",
        "step.depth + 1, self.steps)",
        "step.depth, self.steps)",
        (BATCH_STOP + "steps_in_vain_are_counted",),
    ),
    Mutant(
        "`costs=`: a policy without a word on the next token is taken to be sure of it",
        "inference/policies/batch_stop.py",
        "predictions = self.predicted_next or self.predicted\n",
        "predictions = self.predicted_next\n",
        (rule("Told by costs, light"),),
    ),
    Mutant(
        "max-prob, `costs=`: a row goes on although its own token does not pay",
        "inference/policies/batch_stop.py",
        "goes_on = (surplus > 0) &",
        "goes_on = active &",
        (BATCH_STOP + "a_row_is_trimmed_where_its_own_token_does_not_pay",),
    ),
)

# --- the core --------------------------------------------------------------------------------------------------------

ENUMERATION = "inference/decode/test_enumeration.py::test_"
LOSSLESS = "inference/decode/test_lossless.py::test_"
DRAFTING = "inference/policies/test_drafting.py::test_"
VERIFIERS = "inference/decode/test_verifiers.py::test_"
DECODE = "inference/decode/test_loop.py::test_"
REPLAY = "inference/replay/test_walk.py::test_"
CACHE = "inference/engine/test_cache.py::test_"
BY_FORMULA = LOSSLESS + "verify_accepts_as_often_as_the_formula_says_at_every_depth"

CORE = (
    Mutant(
        "packed: keys are written one row too far",
        "inference/engine/packing.py",
        "return self.taken // self.width, slots",
        "return (self.taken // self.width + 1) % self.rows, slots",
        ("inference/engine/test_packing.py::test_packed_forwards_equal_a_full_forward_after_rollbacks[llama]",),
    ),
    Mutant(
        "packed: whatever it saves",
        "inference/engine/packing.py",
        "0 < PACKED.blocks(0, int(wanted.sum())) < padded",
        "0 < int(wanted.sum()) < wanted.numel()",
        ("inference/engine/test_packing.py::test_a_forward_is_packed_when_that_saves_a_block_of_tokens",),
    ),
    Mutant(
        "packed: the last submitted token is not fed",
        "inference/decode/run.py",
        "ends = rows.lengths + drafted.submitted",
        "ends = rows.lengths + drafted.submitted - 1",
        ("inference/engine/test_packing.py::test_packed_rounds_emit_the_tokens_of_padded_ones[llama-greedy]",),
    ),
    Mutant(
        "costs=auto: all seconds are taken to be the target's",
        "inference/costs/learnt.py",
        "rest = seconds - draft_seconds",
        "rest = seconds",
        ("inference/policies/test_learnt_costs.py::test_they_come_to_the_seconds_of_rounds[packed-0.0]",),
    ),
    Mutant(
        "costs=auto: no round is ever forgotten",
        "inference/costs/learnt.py",
        "if now - each.number < (LONG if is_like(each, rows) else ROUNDS)",
        "if True",
        ("inference/policies/test_learnt_costs.py::test_what_a_token_cost_before_is_forgotten[16-520]",),
    ),
    Mutant(
        "costs=auto: a round without drafts is taken for one with drafts",
        "inference/costs/learnt.py",
        "Timed(float(verified > 0), rest",
        "Timed(1.0, rest",
        ("inference/policies/test_learnt_costs.py::test_a_round_without_drafts_has_costs_of_its_own[0.7]",),
    ),
    Mutant(
        "costs: what a policy predicts of recent rows counts no more than that of all rows",
        "inference/policies/past_rounds.py",
        "return (USUAL * usual + after_lately) / (USUAL + before_lately)",
        "return usual",
        (BATCH_STOP + "predictions_tell_of_other_text_before_verdicts_do", rule("Told by costs, light")),
    ),
    Mutant(
        "costs: what follows the end of a rest is learnt with later rounds",
        "inference/policies/past_rounds.py",
        "if many or drafts == rested:",
        "if many:",
        (BATCH_STOP + "predictions_tell_of_other_text_before_verdicts_do", rule("Foretelling by costs, heavy")),
    ),
    Mutant(
        "costs: many rows' rounds wait for others",
        "inference/policies/past_rounds.py",
        " or waiting * int(live.sum()) >= ROWS_TOGETHER",
        "",
        (rule("Foretelling by costs, heavy"),),
    ),
    Mutant(
        "costs: a request that begins has the record of the one before",
        "inference/policies/past_rounds.py",
        "self.record[:, rows] = 0",
        "pass",
        (rule("Foretelling by costs, heavy"),),
    ),
    Mutant(
        "costs: a new request is judged by the text before it",
        "inference/policies/past_rounds.py",
        "self.recent *= 1 - len(rows) / max(1, len(self.at_best))",
        "pass",
        (BATCH_STOP + "a_new_request_is_not_judged_by_the_text_before",),
    ),
    Mutant(
        "costs: time is worth what it was long ago",
        "inference/policies/past_rounds.py",
        "[lately * total + more for",
        "[keep * total + more for",
        (BATCH_STOP + "time_is_worth_what_the_present_text_makes_of_it[64.0-True]",),
    ),
    Mutant(
        "costs: the first step has to pay by itself",
        "inference/policies/batch_stop.py",
        "rows * max(0.0, rho - token) + later",
        "rows * max(0.0, rho - token)",
        (BATCH_STOP + "a_dear_first_step_pays_with_those_after_it",),
    ),
    Mutant(
        "costs: all rounds pay for the steps that some of them take",
        "inference/policies/past_rounds.py",
        "self.reached[0] *= self.rho",
        "self.reached[0] *= self.rho; self.reached[1:] = 1.0",
        (BATCH_STOP + "steps_that_few_rounds_take_are_paid_for_by_few", rule("Told by costs, dear first")),
    ),
    Mutant(
        "costs: a depth at which nothing is asked counts as one of certain rejection",
        "inference/policies/past_rounds.py",
        "np.copyto(of_tokens[1], of_tokens[2] * self.means[:, None]",
        "np.copyto(of_tokens[1], 0.0",
        ("inference/policies/test_batch_stop.py::test_a_depth_at_which_nothing_is_asked_is_learnt_all_the_same",),
    ),
    Mutant(
        "costs: depths that nobody has tried are doubted one after the other, though the policy predicts",
        "inference/policies/past_rounds.py",
        " if self.predicts else kappa",
        " if False else kappa",
        (
            BATCH_STOP + "a_policy_that_predicts_drafts_far_from_the_first_rounds_on",
            BATCH_STOP + "what_is_expected_of_depths_that_nobody_has_tried[True-chances0]",
        ),
    ),
    Mutant(
        "costs: what is said of a token that was not fed is learnt",
        "inference/policies/batch_stop.py",
        "unread = self.inner.looks_ahead",
        "unread = False",
        (BATCH_STOP + "what_is_said_of_a_token_that_was_not_fed_is_not_learnt[ToldAfter-False]",),
    ),
    Mutant(
        "costs: the first draft of a round is not charged for what makes the round another",
        "inference/policies/past_rounds.py",
        "verify - plain  # more: of any drafts",
        "0.0  # more: of any drafts",
        (rule("Told by costs, other when plain"),),
    ),
    Mutant(
        "costs: the first draft step of a round is priced as the others",
        "inference/policies/past_rounds.py",
        "more = more + first - later",
        "pass",
        (rule("Told by costs, dear first"),),
    ),
    Mutant(
        "costs=auto: a machine that becomes slower is taken for longer texts",
        "inference/costs/learnt.py",
        "rounds = values - drift * means_of_blocks(values, weights, near)",
        "rounds = values",
        ("inference/policies/test_learnt_costs.py::test_a_slower_machine_is_not_taken_for_longer_texts",),
    ),
    Mutant(
        "costs=auto: the first draft step of a round is taken for one of the others",
        "inference/costs/learnt.py",
        "Timed(1 - 1 / ran, draft",
        "Timed(1.0, draft",
        ("inference/policies/test_learnt_costs.py::test_the_first_draft_step_has_costs_of_its_own[packed-0]",),
    ),
    Mutant(
        "costs=auto: among many rounds without drafts, those with drafts are outliers",
        "inference/costs/learnt.py",
        "if (kind & recent).any():",
        "if False:",
        ("inference/policies/test_learnt_costs.py::test_few_rounds_with_drafts_are_no_outliers_among_many_without",),
    ),
    Mutant(
        "goodput: no drafts are taken for a draft of no tokens",
        "inference/policies/goodput.py",
        "torch.where(k == 0, self.costs.plain_seconds(rows, context), seconds)",
        "seconds",
        (
            "inference/policies/test_learnt_costs.py"
            "::test_drafting_is_held_against_a_round_without_drafts[OtherWhenPlain-False-GoodputPolicy]",
        ),
    ),
    Mutant(
        "costs=auto: what a few rounds say of drafts is believed",
        "inference/costs/learnt.py",
        "few = len(drafted) < self._enough(rows, self.rests[-1].context)",
        "few = False",
        ("inference/policies/test_learnt_costs.py::test_a_few_slow_rounds_do_not_end_drafting",),
    ),
    Mutant(
        "costs=auto: no round is remembered for long",
        "inference/costs/learnt.py",
        "ROUNDS, LONG = 128, 512",
        "ROUNDS, LONG = 128, 128",
        (
            "inference/policies/test_learnt_costs.py::test_the_first_draft_step_has_costs_of_its_own[packed-3]",
            "inference/policies/test_learnt_costs.py::test_noise_is_averaged_over_many_rounds",
        ),
    ),
    Mutant(
        "costs=auto: rounds of another load are remembered as long",
        "inference/costs/learnt.py",
        "(LONG if is_like(each, rows) else ROUNDS)",
        "LONG",
        ("inference/policies/test_learnt_costs.py::test_what_a_token_cost_before_is_forgotten[4-140]",),
    ),
    Mutant(
        "costs=auto: nothing is taken to go by blocks",
        "inference/costs/learnt.py",
        "(0.1, 0.05, 0.3, 0.2)",
        "(0.1, 0.05, 0.3, 1e-9)",
        ("inference/policies/test_learnt_costs.py::test_what_goes_by_blocks_is_learnt[InBlocks]",),
    ),
    Mutant(
        "costs: a part of a block is not taken for a whole one",
        "inference/costs/host.py",
        "return -(-(tokens + more) // self.block) - -(-tokens // self.block)",
        "return more / self.block",
        (rule("Told by costs, in blocks, packed"), rule("Told by costs, in blocks, packed by four")),
    ),
    Mutant(
        "costs: the first draft step is not charged for the blocks that it begins",
        "inference/policies/batch_stop.py",
        " - block * self.host.blocks(rows, rows)",
        "",
        (rule("Told by costs, in blocks, packed by four"),),
    ),
    Mutant(
        "costs: a draft step is not charged for the padding that it makes",
        "inference/policies/past_rounds.py",
        "slot, step, more = padding * a_row,",
        "slot, step, more = 0.0,",
        (rule("Told by costs, light"),),
    ),
    Mutant(
        "costs=auto: what other draft lengths took long ago is taken for what they take",
        "inference/costs/learnt.py",
        "np.where(recent, DRIFT, 1.0)",
        "np.where(recent, DRIFT, DRIFT)",
        ("inference/policies/test_learnt_costs.py::test_it_follows_a_machine_that_becomes_another",),
    ),
    Mutant(
        "costs=auto: what a draft model has missed is taken for a part of a draft step",
        "inference/decode/run.py",
        "self._began += self._seconds() - before",
        "pass",
        (
            "inference/policies/test_batch_stop_captured.py"
            "::test_what_the_draft_has_missed_is_no_part_of_a_rounds_seconds[late]",
        ),
    ),
    Mutant(
        "costs=auto: no round tries another length",
        "inference/policies/drafting.py",
        "torch.minimum(limit, self.learnt.limit.to(limit.device))",
        "limit",
        ("inference/policies/test_learnt_costs.py::test_the_first_rounds_try_several_lengths",),
    ),
    Mutant(
        "costs=auto: rounds that compile and capture are learnt from",
        "inference/costs/learnt.py",
        "if not rows or number <= len(TRIAL):",
        "if not rows:",
        ("inference/policies/test_learnt_costs.py::test_nothing_is_learnt_of_the_first_rounds[batch stop]",),
    ),
    Mutant(
        "costs=auto: rounds in which graphs are made are learnt from",
        "inference/decode/run.py",
        "if self.captures == self._captures:",
        "if True:",
        (
            "inference/policies/test_batch_stop_captured.py"
            "::test_a_round_in_which_graphs_are_made_tells_nothing_of_costs",
        ),
    ),
    Mutant(
        "costs=auto: drafting that was too dear is never tried again",
        "inference/costs/learnt.py",
        "if self.unknown:",
        "if False:",
        ("inference/policies/test_learnt_costs.py::test_it_tries_again_where_drafting_was_too_dear[batch stop]",),
    ),
    Mutant(
        "costs=auto: captured rounds do not tell their seconds",
        "inference/decode/run.py",
        "self.drafting.learn_costs(outcome)",
        "pass",
        ("inference/policies/test_batch_stop_captured.py::test_costs_that_are_learnt_reach_captured_steps[greedy]",),
    ),
    Mutant(
        "vllm: a preempted request's drafter is fed what its new blocks have already",
        "inference/adapters/vllm/unfed.py",
        "if each is not None and each.end == spans[row].begin]",
        "if each is not None]",
        ("inference/adapters/vllm/test_unfed.py::test_what_the_target_was_fed_anew_has_not_been_missed",),
    ),
    Mutant(
        "vllm: what the drafter missed is written to another request's blocks",
        "inference/adapters/vllm/unfed.py",
        "table[row_of, at // block_size]",
        "table[0, at // block_size]",
        (
            "inference/adapters/vllm/test_unfed.py"
            "::test_inputs_are_the_missed_tokens_of_these_rows_in_the_requests_own_blocks",
        ),
    ),
    Mutant(
        "costs: a round in which no row wants to draft counts as one with drafts",
        "inference/policies/past_rounds.py",
        "drafts = self.idle > 0, bool(seen.decided[0].any())",
        "drafts = self.idle > 0, True",
        ("inference/policies/test_batch_stop.py::test_a_round_in_which_no_row_wants_to_draft_is_one_without_drafts",),
    ),
    Mutant(
        "costs: a load at which nothing was drafted is taken for known",
        "inference/costs/learnt.py",
        "any(is_like(each, rows) for each in lately)",
        "any(True for each in lately)",
        ("inference/policies/test_learnt_costs.py::test_a_load_at_which_nothing_was_drafted_yet_is_tried_at_once",),
    ),
    Mutant(
        "costs: who once rests is not asked again",
        "inference/policies/drafting.py",
        "self.idle % min(1 + self.idle // 8, 4) > 0",
        "(self.idle % min(1 + self.idle // 8, 4) > 0 or self.idle > 12)",
        (
            "inference/policies/test_drafting.py"
            "::test_who_may_rest_is_asked_in_ever_fewer_rounds_while_nothing_is_drafted",
        ),
    ),
    Mutant(
        "costs: the loop tells a policy of rounds in which it was not asked",
        "inference/decode/run.py",
        "if self._rests:\n            return finished",
        "if False:\n            return finished",
        ("inference/policies/test_batch_stop.py::test_replay_counts_what_the_loop_does[at rest]",),
    ),
    Mutant(
        "vllm: a policy is told of rounds in which it was not asked",
        "inference/adapters/vllm/host.py",
        "if self.drafting.learns and not self.rests:",
        "if self.drafting.learns:",
        (
            "inference/adapters/vllm/test_host.py"
            "::test_a_policy_at_rest_is_neither_asked_nor_told_and_hears_of_all_its_drafts",
        ),
    ),
    Mutant(
        "costs: the first step is decided for the rows of the round before",
        "inference/policies/batch_stop.py",
        "goes_by = probes, list(live), past.rounds",
        "goes_by = probes, past.rounds",
        (BATCH_STOP + "each_round_is_planned_for_its_own_rows",),
    ),
    Mutant(
        "costs: a policy is not told of the round that begins",
        "inference/policies/drafting.py",
        "if self.plans and not rests:",
        "if self.plans and rests:",
        ("inference/policies/test_drafting.py::test_a_policy_plans_each_round_in_which_it_is_asked",),
    ),
    Mutant(
        "costs: a request that does not pay drafts on",
        "inference/policies/batch_stop.py",
        "(rho * at_best > token)",
        "(rho > token)",
        (BATCH_STOP + "a_request_whose_tokens_do_not_pay_drafts_nothing_and_is_tried_again",),
    ),
    Mutant(
        "fit: a gain that chance alone could give is enough",
        "accept_head/fit/verdict.py",
        "gains[kind][use].low > 0",
        "gains[kind][use].value > 0",
        ("accept_head/fit/test_verdict.py::test_a_head_that_is_hardly_better_is_not",),
    ),
    Mutant(
        "fit: the test prompts are trained on as well",
        "accept_head/fit/prompts.py",
        "mine, in_turn = in_turn[: sizes[split]], in_turn[sizes[split] :]",
        "mine = in_turn[: sizes[split]]",
        ("accept_head/fit/test_plan.py::test_splits_have_all_domains_and_no_prompt_twice",),
    ),
    Mutant(
        "progress: a line between two steps counts the next step twice",
        "accept_head/console.py",
        "                self.refresh()\n\n    def display",
        "                self.refresh()\n                self.last_print_t = self._time()\n\n    def display",
        ("accept_head/test_console.py::test_slow_steps_of_a_loop_are_counted_once",),
    ),
    Mutant(
        "grouped attention: a mask's queries are those of another head",
        "inference/engine/attention/grouped.py",
        "added.repeat(1, 1, group, 1)",
        "added.repeat_interleave(group, dim=2)",
        ("inference/engine/attention/test_grouped.py::test_it_is_transformers_attention",),
    ),
    Mutant(
        "EAGLE-3: the newest token is taken as fed",
        "inference/decode/drafter.py",
        "self.rows.lengths - self.rows.round_accepted - 1)",
        "self.rows.lengths - self.rows.round_accepted)",
        ("inference/decode/test_eagle3.py::test_drafts_are_those_of_a_plain_recomputation",),
    ),
    Mutant(
        "EAGLE-3: a round without drafts leaves its tokens unfed",
        "inference/decode/drafter.py",
        "if not self.begun:",
        "if False:",
        ("inference/decode/test_eagle3.py::test_few_tokens_are_fed_at_once_or_wait[WAITING_STATES]",),
    ),
    Mutant(
        "EAGLE-3: all that wait are fed the states of the first",
        "inference/decode/drafter.py",
        "self.states[:, begin:end]",
        "self.states[:, : end - begin]",
        ("inference/decode/test_eagle3.py::test_few_tokens_are_fed_at_once_or_wait[FILL_TOKENS]",),
    ),
    Mutant(
        "EAGLE-3: once it has caught up, it is fed the state of a token before",
        "inference/decode/drafter.py",
        "last.device), last][:, None]",
        "last.device), last - 1][:, None]",
        ("inference/decode/test_eagle3.py::test_drafts_are_those_of_a_plain_recomputation",),
    ),
    Mutant(
        "EAGLE-3: it predicts from the first token that it was not fed",
        "inference/decode/drafter.py",
        "(rows.lengths - 1 - first).clamp(min=0)",
        "torch.zeros_like(first)",
        ("inference/decode/test_eagle3.py::test_drafts_are_those_of_a_plain_recomputation",),
    ),
    Mutant(
        "EAGLE-3: a step attends to the first step's keys of its own round, too",
        "accept_head/eagle3/unroll.py",
        "(self.asked - step)[..., None]",
        "self.asked[..., None]",
        ("accept_head/test_eagle3_unroll.py::test_each_round_is_that_of_forwards_one_after_the_other",),
    ),
    Mutant(
        "EAGLE-3: a rollout goes on from the state of the round's start",
        "inference/replay/depths.py",
        "own, here = output.own,",
        "here =",
        ("inference/replay/test_depths.py::test_rollouts_are_drawn_from_the_rounds_own_states",),
    ),
    Mutant(
        "EAGLE-3: the oracle counts the tokens of every depth",
        "inference/replay/walk.py",
        "if traces.depths == 1:",
        "if True:",
        ("inference/replay/test_depths.py::test_the_oracle_stops_before_each_rejection_of_its_own_rounds",),
    ),
    Mutant(
        "a request's own bound on its drafts is not asked",
        "inference/decode/steps.py",
        "torch.minimum(rows.max_lengths - rows.lengths - 1, rows.k_max)",
        "rows.max_lengths - rows.lengths - 1",
        ("inference/decode/test_k_max.py::test_each_request_is_as_with_a_policy_of_that_bound",),
    ),
    Mutant(
        "heads for EAGLE-3: a label counts as if all tokens before it were accepted",
        "training/learn/depth_states.py",
        "chance[:-1, depth - 1] * overlap[:-1, depth - 1]",
        "chance[:-1, depth - 1]",
        ("training/test_depth_states.py::test_places_are_those_of_rounds_from_every_position",),
    ),
    Mutant(
        "heads for EAGLE-3: the states are those of the trace before",
        "training/learn/depth_states.py",
        "first, last = self.starts[shard][place : place + 2]",
        "first, last = self.starts[shard][max(place - 1, 0) : max(place - 1, 0) + 2]",
        ("training/test_depth_states.py::test_a_trace_has_the_states_that_were_collected_with_it",),
    ),
    Mutant(
        "report: a token of an EAGLE-3 round is judged as the first of one",
        "inference/report/rounds.py",
        'record["acceptance"][token - first * traces.depths]',
        'record["acceptance"][(step + depth) * traces.depths]',
        ("inference/replay/test_depths.py::test_viewed_rounds_and_calibration_take_each_token_at_its_depth",),
    ),
    Mutant(
        "vLLM: the token after a draft is not counted as the request's",
        "inference/adapters/vllm/host.py",
        "end.length - now - 1) for",
        "end.length - now) for",
        ("inference/adapters/vllm/test_host.py::test_a_row_drafts_no_more_than_its_text_has_room_for",),
    ),
    Mutant(
        "verification: redrawn from p, not from the residual",
        "inference/kernels/verify.py",
        "residual(p_next, q_next), p_next)",
        "p_next, p_next)",
        (ENUMERATION + "a_row_alone",),
    ),
    Mutant(
        "verification: accepts a little too often",
        "inference/kernels/verify.py",
        "_leading(accept_uniform < acceptance, drafted)",
        "_leading(accept_uniform < 1.1 * acceptance, drafted)",
        (BY_FORMULA,),
    ),
    Mutant(
        "verification: accepted tokens after a rejected one count",
        "inference/kernels/verify.py",
        ".long().cumprod(-1).sum(-1)",
        ".long().sum(-1)",
        (BY_FORMULA,),
    ),
    Mutant(
        "verification: one token more than the row has drafted",
        "inference/kernels/verify.py",
        "device=passed.device) < drafted[:, None]",
        "device=passed.device) <= drafted[:, None]",
        (LOSSLESS + "every_policy_leaves_the_targets_distribution[confidence-T=1]",),
    ),
    Mutant(
        "verification: the bonus token is redrawn from the residual",
        "inference/kernels/verify.py",
        "rejected = (accepted < drafted)[:, None]",
        "rejected = (accepted <= drafted)[:, None]",
        (ENUMERATION + "a_row_alone",),
    ),
    Mutant(
        "acceptance: the ratio the other way round",
        "accept_head/acceptance.py",
        "return _ratio(p, q, y).clamp(max=1.0)",
        "return _ratio(q, p, y).clamp(max=1.0)",
        ("accept_head/test_acceptance.py::test_acceptance_probability_is_the_clipped_likelihood_ratio",),
    ),
    Mutant(
        "rows: the end token is left out",
        "inference/kernels/rows.py",
        "ends.int().argmax(-1) + 1, emitted)",
        "ends.int().argmax(-1), emitted)",
        ("inference/decode/test_stopping.py::test_end_tokens_end_a_response_and_are_part_of_it",),
    ),
    Mutant(
        "rows: the draft is taken to have been fed its last token",
        "inference/kernels/rows.py",
        "torch.minimum(verified, counts.drafted - 1)",
        "torch.minimum(verified, counts.drafted)",
        (DECODE + "drafts_are_sampled_from_the_drafts_own_distribution_given_the_prefix",),
    ),
    Mutant(
        "rows: forwards that drew nothing are not counted",
        "inference/kernels/rows.py",
        "rows.draft_forwards.add_(counts.drafted + counts.extra_forwards)",
        "rows.draft_forwards.add_(counts.drafted)",
        (DECODE + "a_head_read_at_lag_0_costs_one_more_draft_forward_each_time_it_stops_a_round",),
    ),
    Mutant(
        "steps: the draft's random number decides about acceptance, too",
        "inference/decode/steps.py",
        "rows.uniforms[:, DecodeStream.ACCEPT, :k]",
        "rows.uniforms[:, DecodeStream.DRAFT, :k]",
        (LOSSLESS + "every_policy_leaves_the_targets_distribution[fixed:2-T=1]",),
    ),
    Mutant(
        "steps: all tokens of a draft are drawn by one number",
        "inference/decode/steps.py",
        "DecodeStream.DRAFT, depth - 1]",
        "DecodeStream.DRAFT, 0]",
        (LOSSLESS + "every_policy_leaves_the_targets_distribution[fixed:2-T=1]",),
    ),
    Mutant(
        "steps: the last token of a response is drafted, too",
        "inference/decode/steps.py",
        "rows.max_lengths - rows.lengths - 1,",
        "rows.max_lengths - rows.lengths,",
        (DECODE + "forwards_and_tokens_add_up",),
    ),
    Mutant(
        "loop: what the policy drops is verified",
        "inference/decode/loop.py",
        "drafted.submit(drafting.trim(drafted.lengths))",
        "drafting.trim(drafted.lengths)",
        (VERIFIERS + "dropped_tokens_are_drafted_and_discarded_but_not_verified",),
    ),
    Mutant(
        "loop: a drawn token is fed before it is asked for",
        "inference/decode/loop.py",
        "if drafting.looks_ahead and depth < most else None",
        "if depth < most else None",
        (DECODE + "a_policy_that_stops_early_costs_one_draft_forward_a_token",),
    ),
    Mutant(
        "loop: a policy that reads the state at a token is asked before it is fed",
        "inference/decode/loop.py",
        "if drafting.looks_ahead and depth < most else None",
        "if drafting.looks_ahead and depth + 1 < most else None",
        (DECODE + "the_head_policy_follows_the_product_rule",),
    ),
    Mutant(
        "drafting: one token more than the budget",
        "inference/policies/drafting.py",
        "(lengths < progress.budget)",
        "(lengths <= progress.budget)",
        (DRAFTING + "a_row_drafts_its_budget_and_no_more_beside_rows_that_may_draft_more",),
    ),
    Mutant(
        "drafting: rows that have stopped go on when the policy says so",
        "inference/policies/drafting.py",
        "active = progress.active & wanted",
        "active = wanted",
        (DRAFTING + "a_row_that_has_stopped_does_not_go_on_when_the_policy_says_so",),
    ),
    Mutant(
        "drafting: a policy may keep more than it drafted",
        "inference/policies/drafting.py",
        "torch.minimum(kept, drafted).clamp(min=0)",
        "kept.clamp(min=0)",
        (DRAFTING + "no_row_submits_more_than_it_drafted_or_less_than_nothing",),
    ),
    Mutant(
        "cache: positions are one too far",
        "inference/engine/cache.py",
        "positions = starts[:, None] + torch.arange(width, device=starts.device)",
        "positions = starts[:, None] + torch.arange(width, device=starts.device) + (starts[:, None] > 0)",
        (CACHE + "cached_forwards_equal_a_full_forward_after_rollbacks",),
    ),
    Mutant(
        "cache: a forward does not look at its own last slot",
        "inference/engine/cache.py",
        "given = input_ids, starts, self._extent(longest_start + width), reach",
        "given = input_ids, starts, self._extent(longest_start + width - 1), reach",
        (CACHE + "cached_forwards_equal_a_full_forward_after_rollbacks",),
    ),
    Mutant(
        "cache: long prompts are fed with holes",
        "inference/engine/cache.py",
        "rest = [(row, start + width, end)",
        "rest = [(row, start + width + 1, end)",
        (CACHE + "filling_in_pieces_and_some_rows_only_equals_a_full_forward",),
    ),
    Mutant(
        "replay, the walk: no token after those accepted",
        "inference/replay/walk.py",
        "torch.minimum(place + accepted + 1, end)",
        "torch.minimum(place + accepted.clamp(min=1), end)",
        (REPLAY + "fixed_lengths_replay_as_the_slow_walk",),
    ),
    Mutant(
        "replay, the walk: forwards that drew nothing are counted of rows that are done",
        "inference/replay/walk.py",
        "(extra_forwards[here, lane] & live)",
        "extra_forwards[here, lane]",
        (REPLAY + "threshold_rules_replay_as_the_slow_walk_and_as_the_policy_itself_answers",),
    ),
    Mutant(
        "replay, thresholds: a lag is not looked at",
        "inference/replay/thresholds.py",
        "later = 1 + policy.lag",
        "later = 1",
        (REPLAY + "lags_are_told_apart",),
    ),
    Mutant(
        "replay, thresholds: a statistic at the level stops",
        "inference/replay/thresholds.py",
        "(running >= policy.level_of(threshold))",
        "(running > policy.level_of(threshold))",
        ("inference/replay/test_ties.py::test_a_token_that_scores_the_threshold_goes_on",),
    ),
    Mutant(
        "replay, asking: rows that have stopped are shown as active",
        "inference/replay/asking.py",
        "active=progress.active,",
        "active=progress.budget > 0,",
        (REPLAY + "a_policy_is_told_what_the_decode_loop_would_tell_it",),
    ),
    Mutant(
        "replay, asking: the divergence is of the next position",
        "inference/replay/asking.py",
        "slots = self.traces.tokens_of(here[:, None], torch.arange(int(submitted.max())))",
        "slots = self.traces.tokens_of(here[:, None] + 1, torch.arange(int(submitted.max())))",
        (REPLAY + "a_policy_is_told_what_the_decode_loop_would_tell_it",),
    ),
    Mutant(
        "enumeration: the residual the other way round",
        "inference/replay/lossless.py",
        "left = np.maximum(p - q, 0)",
        "left = np.maximum(q - p, 0)",
        ("inference/policies/test_lossless.py::test_one_slot_is_emitted_by_the_formula",),
    ),
    Mutant(
        "enumeration: nothing is dropped",
        "inference/replay/lossless.py",
        "drafting.trim(drafted) if drafting.trims and progress.budget.any() else drafted",
        "drafted",
        ("inference/policies/test_lossless.py::test_the_policies_that_trim_did",),
    ),
    Mutant(
        "collect: one random number couples and redraws",
        "training/collect/score.py",
        "p_of_x, q, x, accept_uniform, redraw_uniform)",
        "p_of_x, q, x, accept_uniform, accept_uniform)",
        ("training/test_score.py::test_every_column_equals_that_of_a_slow_loop",),
    ),
    Mutant(
        "collect: a distribution is read one position late",
        "training/collect/score.py",
        "fed = [*prompt, *response[:-1]]",
        "fed = [*prompt[1:], *response]",
        ("training/test_score.py::test_every_column_equals_that_of_a_slow_loop",),
    ),
    Mutant(
        "collect, our loop: the draft is read one position late",
        "training/collect/decoding.py",
        "ends = [lengths[row] - 1 for row in rows]",
        "ends = [lengths[row] for row in rows]",
        ("training/test_decoding.py::test_columns_are_those_of_scoring_afterwards",),
    ),
    Mutant(
        "collect, our loop: random numbers start anew with each part that is scored",
        "training/collect/decoding.py",
        "response.scored, response.pending = response.scored + response.pending, 0",
        "response.scored, response.pending = response.scored, 0",
        ("training/test_decoding.py::test_columns_are_those_of_scoring_afterwards",),
    ),
    Mutant(
        "train, the base: the ridge is its inverse",
        "training/learn/base.py",
        "C=1 / ridge",
        "C=ridge",
        ("training/test_base.py::test_it_is_the_optimum_of_weighted_cross_entropy_and_ridge",),
    ),
    Mutant(
        "train, the base: accepted and rejected tokens weigh alike",
        "training/learn/base.py",
        "w_rej * reject.numpy()",
        "w_acc * reject.numpy()",
        ("training/test_base.py::test_it_is_the_optimum_of_weighted_cross_entropy_and_ridge",),
    ),
    Mutant(
        "train, mixing: r is the share of the draft's tokens",
        "training/learn/mixing.py",
        "torch.where(uniform < r, response_ids, draft_ids)",
        "torch.where(uniform < r, draft_ids, response_ids)",
        ("training/test_mixing.py::test_mixed_token_is_the_targets_exactly_where_the_uniform_is_below_r",),
    ),
    Mutant(
        "train, packing: a proposal sees the target's token in its place",
        "training/learn/mixing.py",
        "torch.arange(trunk) < torch.arange(start, trunk).unsqueeze(-1)",
        "torch.arange(trunk) <= torch.arange(start, trunk).unsqueeze(-1)",
        ("training/test_mixing.py::test_packed_state_at_every_proposal_equals_that_of_a_forward_of_its_own",),
    ),
    Mutant(
        "train, the loss: rejected tokens do not weigh more",
        "training/learn/gradient.py",
        "both = accept + w_rej * positions.reject",
        "both = accept + positions.reject",
        ("training/test_gradient.py::test_value_and_gradients_are_autograds",),
    ),
    Mutant(
        "head: the mean of the signals is folded in with the wrong sign",
        "accept_head/head/scorer.py",
        "return scale, -(scaled @ head.signal_mean)",
        "return scale, scaled @ head.signal_mean",
        ("accept_head/test_base.py::test_serving_scores_are_the_probabilities",),
    ),
    Mutant(
        "costs: tokens/s without what is discarded",
        "accept_head/cost.py",
        "costs.t_draft * (1 + discard_rate) + (costs",
        "costs.t_draft * 1 + (costs",
        ("accept_head/test_cost.py::test_time_per_token_is_equation_5_1",),
    ),
    Mutant(
        "costs: the oracle pays for a rejection at the last position",
        "accept_head/cost.py",
        "target_forwards = min(rejections + 1, generated)",
        "target_forwards = min(rejections + 2, generated)",
        ("accept_head/test_cost.py::test_the_oracle_is_the_cheapest_of_all_schedules",),
    ),
    Mutant(
        "vLLM: a verdict on zeros is taken for one on our drafts",
        "inference/adapters/vllm/host.py",
        "there and self.live[before] and lengths[row] == self.context[before] + taken + 1)",
        "there and self.live[before])",
        ("inference/adapters/vllm/test_host.py::test_a_verdict_on_other_drafts_than_ours_counts_for_nothing",),
    ),
    Mutant(
        "vLLM: a token's embedding is that of its place in the drafter's own vocabulary",
        "inference/adapters/vllm/host.py",
        "step = DraftStep(self.depth, token_ids, self._active()",
        "step = DraftStep(self.depth, token_ids if places is None else places, self._active()",
        ("inference/adapters/vllm/test_host.py::test_signals_are_read_at_a_tokens_place_and_its_embedding_by_its_id",),
    ),
    Mutant(
        "vLLM: a token's embedding is that of its place, where head and signals are read at once",
        "inference/policies/reader.py",
        "return _scored(score, signals_of_q(q, places), ids, hidden, alone)",
        "return _scored(score, signals_of_q(q, places), places if ids is not None else None, hidden, alone)",
        ("inference/engine/test_compiled.py::test_what_is_read_at_once_is_what_is_read_one_by_one",),
    ),
    Mutant(
        "compiled steps: signals are of a token's id, where the drafter has a vocabulary of its own",
        "inference/decode/steps.py",
        "given = place, ids, fed.hidden[:, 0]",
        "given = place if self.narrow is None else ids % len(self.narrow.d2t), ids, fed.hidden[:, 0]",
        ("inference/decode/test_compiled_steps.py::test_a_drafters_own_tokens_are_read_where_they_lie",),
    ),
    Mutant(
        "vLLM: a verdict is in the order of the rows now",
        "inference/adapters/vllm/host.py",
        "if requests == self.requests else _positions(self.requests, requests)",
        "if requests == self.requests else [min(row, len(requests) - 1) for row in range(len(self.requests))]",
        (
            "inference/adapters/vllm/test_host.py::test_the_verdict_reaches_the_policy_in_the_order_of_the_round_it_is_on",
        ),
    ),
    Mutant(
        "vLLM: a token is judged by the state before it",
        "inference/adapters/vllm/host.py",
        "step, self.pending = replace(self.pending, drawn_hidden=hidden), None",
        "step, self.pending = replace(self.pending, drawn_hidden=self.hidden), None",
        ("inference/adapters/vllm/test_host.py::test_heads_read_the_state_that_they_were_trained_on",),
    ),
)

MUTANTS = POLICIES + CORE


def out_of_date(mutants: tuple[Mutant, ...], tree: Path) -> list[str]:
    """What is wrong with mutants of text that is not in the tree exactly once."""
    found = []
    for mutant in mutants:
        count = (tree / mutant.file).read_text(encoding="utf-8").count(mutant.text)
        if count != 1:
            found.append(f"out of date: {mutant.name}: {mutant.file} has {mutant.text!r} {count} times")
    return found


def copy_commit(tree: Path) -> str:
    """Copy the commit that is checked out, links as links → its name."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    commit = head.stdout.strip()
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x"], cwd=tree, check=True, input=archive)
    return commit


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run them in the tree → pytest's status, and what it printed."""
    # No bytecode: it is told from its source by size and second, which a mutant may share with what it replaces.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def broken_by(tree: Path, mutant: Mutant) -> str | None:
    """The test that fails with this mutant; None if all pass. Raises RuntimeError where they do not run."""
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutant.text, mutant.becomes), encoding="utf-8")
    status, printed = run_tests(tree, mutant.tests)
    path.write_text(original, encoding="utf-8")
    if status not in (PASSED, FAILED):
        raise RuntimeError(f"{mutant.name}: its tests do not run\n{printed}")
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" ", 1)[1].split(" - ")[0] if status == FAILED else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the names of those to try")
    only = parser.parse_args().only
    mutants = tuple(mutant for mutant in MUTANTS if only in mutant.name)
    if not mutants:
        sys.exit(f"no mutant has {only!r} in its name")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        commit = copy_commit(tree)
        if wrong := out_of_date(mutants, tree):
            sys.exit("\n".join(wrong))
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        status, printed = run_tests(tree, tests)
        if status != PASSED:
            sys.exit(f"without any mutant the tests do not pass:\n{printed}")
        print(printed.strip().splitlines()[-1], "without any mutant", flush=True)
        for mutant in mutants:
            began = time.perf_counter()
            test = broken_by(tree, mutant)
            seconds = round(time.perf_counter() - began)
            rows.append({**mutant._asdict(), "caught": test is not None, "failed": test, "seconds": seconds})
            print(f"{'caught' if test else 'NOT caught'}: {mutant.name} ({seconds} s)", flush=True)
    caught = sum(row["caught"] for row in rows)
    print(f"{caught} of {len(rows)} caught")
    if not only:
        write_result("mutants", {"commit": commit, "mutants": len(rows), "caught": caught, "rows": rows})
    sys.exit(caught < len(rows))


if __name__ == "__main__":
    main()
