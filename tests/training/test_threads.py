"""Parallel work really runs in parallel, in order, and passes on errors. test_sweep shows that it changes no bit."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from accept_head.training.threads import ReadAhead, Threads, thread_count

SECONDS = 60  # a deadlock, not a slow machine


@pytest.mark.parametrize(
    ("threads", "processes", "allowed", "expected"),
    [
        ("auto", 2, None, 6),
        ("auto", 1, None, 8),
        ("auto", 5, None, 2),
        ("auto", 1, "2", 2),
        ("auto", 16, None, 1),
        ("auto", 2, "no number", 6),
        (16, 2, "1", 16),
    ],
)
def test_number_of_threads(monkeypatch, threads, processes, allowed, expected):
    """On twelve cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert thread_count(threads, processes=processes) == expected


# --- heads -----------------------------------------------------------------------------------------------------------


def test_heads_learn_at_once():
    """Two that wait for one another: in turn, the first would wait in vain."""
    meeting = threading.Barrier(2)

    def meet(item):
        meeting.wait(timeout=SECONDS)
        return item

    assert Threads(2).map(meet, ["a", "b"]) == ["a", "b"]
    meeting = threading.Barrier(2)
    with pytest.raises(threading.BrokenBarrierError):
        Threads(1).map(lambda item: meeting.wait(timeout=0.1), ["a", "b"])


def test_threads_take_no_gradients_split_no_product_and_hand_on_an_error():
    weight = torch.ones(2, requires_grad=True)
    for threads in (Threads(1), Threads(2)):
        assert not any(one.requires_grad for one in threads.map(lambda factor: factor * weight, [1, 2, 3]))
        with pytest.raises(ZeroDivisionError):
            threads.map(lambda divisor: 1 // divisor, [1, 0])
    assert Threads(2).map(lambda item: torch.get_num_threads(), [1, 2]) == [1, 1]


# --- reading ahead ---------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    threads = Threads(2)
    yield threads
    threads.pool.shutdown()


def test_batches_come_in_order_each_once(threads):
    batches = ReadAhead(list(range(7)), lambda batch: batch * batch, threads)
    assert len(batches) == 7
    for _ in range(2):
        assert list(batches) == [0, 1, 4, 9, 16, 25, 36]
    assert list(ReadAhead([], str, threads)) == []


def test_it_is_one_batch_ahead_and_no_more(threads):
    read = [threading.Event() for _ in range(5)]
    batches = iter(ReadAhead(list(range(5)), lambda batch: read[batch].set() or batch, threads))
    for turn in range(5):
        assert next(batches) == turn
        if turn + 1 < 5:
            assert read[turn + 1].wait(timeout=SECONDS), "the next batch is not read before it is asked for"
        assert not any(later.is_set() for later in read[turn + 2 :])


def test_all_threads_take_heads_once_the_next_batch_is_read(threads):
    """While one still reads, the other goes through the heads alone; after that, two heads that wait for one another
    meet."""
    reading = threading.Event()
    batches = iter(ReadAhead([0, 1], lambda batch: batch == 0 or reading.wait(timeout=SECONDS), threads))
    assert next(batches)
    by = set(threads.map(lambda head: threading.get_ident(), range(4)))
    assert len(by) == 1
    reading.set()
    assert next(batches)
    meeting = threading.Barrier(2)
    threads.map(lambda head: meeting.wait(timeout=SECONDS), range(2))


def test_an_error_comes_at_its_batches_turn(threads):
    batches = iter(ReadAhead([1, 2, 0, 3], lambda batch: 6 // batch, threads))
    assert [next(batches), next(batches)] == [6, 3]
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_who_stops_asking_leaves_nothing_running(threads):
    """Closing waits for the batch that is being read."""
    started, going_on, finished = threading.Event(), threading.Event(), []

    def read(batch):
        if batch == 1:
            started.set()
            going_on.wait(timeout=SECONDS)
        finished.append(batch)
        return batch

    batches = iter(ReadAhead(list(range(5)), read, threads))
    assert next(batches) == 0
    assert started.wait(timeout=SECONDS)
    closing = threading.Thread(target=batches.close)
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive()
    going_on.set()
    closing.join(timeout=SECONDS)
    assert finished == [0, 1]
    assert threads.map(lambda item: item, [1, 2]) == [1, 2], "the threads are there for others"
