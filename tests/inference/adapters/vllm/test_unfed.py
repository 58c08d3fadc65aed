"""What the drafter has not been fed: who has missed what, and until when it may wait."""

from __future__ import annotations

import numpy as np
import torch

from accept_head.inference.adapters.vllm.unfed import Span, Unfed, catching_up
from accept_head.inference.engine.memory import WAITING_STATES


def states_of(*spans):
    """(tokens, 2): the position, and the first letter of the request's name."""
    return torch.tensor([[at, ord(name[0])] for name, begin, end in spans for at in range(begin, end)])


def put_off(unfed, *spans, known="abc"):
    return unfed.put_off([Span(*each) for each in spans], states_of(*spans), known)


def taken(unfed, *spans):
    missed = unfed.take([Span(*each) for each in spans])
    return {row: (each.begin, each.end, torch.cat(each.states)[:, 0].tolist()) for row, each in missed}


def test_each_request_has_missed_what_was_put_off_since_it_was_fed():
    unfed = Unfed(100, reads_states=True)
    assert put_off(unfed, ("a", 7, 8), ("b", 3, 6))
    assert put_off(unfed, ("b", 6, 7), ("a", 8, 9))
    assert taken(unfed, ("a", 9, 10), ("c", 0, 5)) == {0: (7, 9, [7, 8])}
    assert taken(unfed, ("a", 10, 11), ("b", 7, 8)) == {1: (3, 7, [3, 4, 5, 6])}


def test_what_the_target_was_fed_anew_has_not_been_missed():
    """vLLM has preempted a request and begins it again: its blocks are others."""
    unfed = Unfed(100, reads_states=True)
    put_off(unfed, ("a", 7, 8))
    assert put_off(unfed, ("a", 0, 4)) and taken(unfed, ("a", 4, 5)) == {0: (0, 4, [0, 1, 2, 3])}
    put_off(unfed, ("a", 7, 8))
    assert taken(unfed, ("a", 0, 8)) == {} and taken(unfed, ("a", 8, 9)) == {}


def test_no_more_is_put_off_than_a_forward_takes_and_requests_that_ended_cost_none():
    unfed = Unfed(6, reads_states=True)
    assert put_off(unfed, ("a", 0, 4)) and not put_off(unfed, ("a", 4, 5), ("b", 0, 2))
    assert taken(unfed, ("a", 4, 5)) == {0: (0, 4, [0, 1, 2, 3])}, "what does not fit changes nothing"
    assert put_off(unfed, ("a", 5, 9)) and not put_off(unfed, ("b", 0, 3)) and put_off(unfed, ("b", 0, 3), known="bc")


def test_few_states_are_kept_and_any_number_of_tokens():
    most = WAITING_STATES // (1 << 19)
    for reads_states, tokens, waits in ((True, most, True), (True, most + 1, False), (False, most + 1, True)):
        states = torch.zeros(1 << 18, dtype=torch.bfloat16).expand(tokens, -1)
        assert Unfed(10_000, reads_states=reads_states).put_off([Span("a", 0, tokens)], states, "a") == waits


def test_inputs_are_the_missed_tokens_of_these_rows_in_the_requests_own_blocks():
    class Metadata:
        def __init__(self, **fields):
            self.__dict__ |= fields

    now = Metadata(block_table_tensor=torch.tensor([[9, 8], [5, 3], [2, 7]]), slot_mapping=torch.zeros(3))
    token_ids = np.arange(24, dtype=np.int32).reshape(3, 8)
    unfed = Unfed(100, reads_states=True)
    put_off(unfed, ("c", 3, 5), ("a", 2, 3))
    missed = unfed.take([Span("a", 3, 4), Span("b", 0, 1), Span("c", 5, 6)])
    made = catching_up(missed, token_ids, {"common_attn_metadata": now, "else": 1}, block_size=4)
    assert made["target_token_ids"].tolist() == [2, 19, 20] and made["next_token_ids"].tolist() == [3, 21]
    assert made["target_positions"].tolist() == [2, 3, 4] and made["else"] == 1
    assert made["target_hidden_states"].tolist() == [[2, ord("a")], [3, ord("c")], [4, ord("c")]]
    then = made["common_attn_metadata"]
    assert then.slot_mapping.tolist() == [9 * 4 + 2, 2 * 4 + 3, 7 * 4 + 0]
    assert then.query_start_loc.tolist() == then.query_start_loc_cpu.tolist() == [0, 1, 3]
    assert then.seq_lens.tolist() == [3, 5] and (then.num_reqs, then.num_actual_tokens) == (2, 3)
    assert (then.max_query_len, then.max_seq_len) == (2, 5)
