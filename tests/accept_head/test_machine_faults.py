"""Faults of the disk or of other ranks, which are neither wrong input nor bugs: one line each, and no traceback."""

import errno
import sys
import threading
import types

import pytest

from accept_head import cli
from accept_head.command import libraries, ranks
from accept_head.command.ranks import lost_a_rank
from accept_head.errors import InputError

GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:30098: Connection reset by peer"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(error) → exit code and stderr of a verb that raises it."""

    def raising(error):
        def verb() -> None:
            raise error

        module = types.ModuleType("faulty")
        module.verb = verb
        monkeypatch.setitem(sys.modules, "faulty", module)
        monkeypatch.setitem(cli.VERBS, "faulty", ("faulty", "verb", "raises"))
        monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # a verb sets it
        code = cli.main(["faulty"])
        return code, capsys.readouterr().err

    return raising


def test_a_full_disk_is_one_line_that_names_the_file_and_exit_code_2(run):
    code, err = run(OSError(errno.ENOSPC, "No space left on device", "/big/head"))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("accept-head: error: /big/head: No space left on device")


def test_another_error_of_the_system_is_a_bug(run):
    with pytest.raises(OSError):
        run(OSError(errno.ENOTCONN, "not connected"))


def test_a_rank_whose_peer_has_gone_waits_for_the_launcher_to_say_which(run, monkeypatch):
    waited = []
    monkeypatch.setattr(ranks.time, "sleep", waited.append)
    code, err = run(RuntimeError(GLOO))
    assert code == 1 and err.count("\n") == 1 and "another rank has ended" in err
    assert waited and waited[0] > 2 * 5, "Lightning looks every 5 seconds"


def test_which_errors_are_those_of_a_rank_that_has_gone():
    assert lost_a_rank(RuntimeError(GLOO))
    assert lost_a_rank(RuntimeError("NCCL communicator was aborted on rank 1"))
    chained = ValueError("while closing the logs")
    chained.__context__ = RuntimeError(GLOO)
    assert lost_a_rank(chained)
    for error in (
        None,
        RuntimeError("shapes differ"),
        InputError(GLOO),
        OSError(errno.ECONNRESET, "Connection reset by peer"),
    ):
        assert not lost_a_rank(error)


@pytest.mark.parametrize(("error", "shown"), [(OSError(errno.ENOSPC, "No space left"), False), (KeyError("x"), True)])
def test_a_thread_that_finds_the_disk_full_leaves_the_word_to_the_command(error, shown, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(threading, "excepthook", libraries.show_thread_error)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert ("Traceback" in capsys.readouterr().err) == shown
