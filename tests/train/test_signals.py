"""Signals are recorded, earlier handlers are called, and closing restores those handlers."""

import logging
import os
import signal
import threading

import pytest
from support.forked import in_child

from tierfs.errors import InvalidInputError
from tierfs.train.decider import Signals


@pytest.fixture
def before():
    """The signals that another handler, installed before, received."""
    got = []
    old = signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, old)


def test_the_handler_that_was_there_is_called_and_comes_back(before):
    theirs = signal.getsignal(signal.SIGUSR1)
    signals = Signals([signal.SIGUSR1])
    assert signals.received == 0
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (signals.received, before) == (signal.SIGUSR1, [signal.SIGUSR1])
    assert signals.received_s > 0
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is theirs


@pytest.mark.parametrize("wrong", [signal.SIGKILL, 1000])
def test_handlers_are_set_for_all_signals_or_none(before, wrong):
    theirs = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InvalidInputError, match=f"signal {int(wrong)} cannot be handled"):
        Signals([signal.SIGUSR1, wrong, signal.SIGCONT])
    assert signal.getsignal(signal.SIGUSR1) is theirs
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL


def test_the_first_signal_counts(before):
    signals = Signals([signal.SIGUSR1, signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (signals.received, before) == (signal.SIGUSR2, [signal.SIGUSR1])
    signals.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_that_was_set_later_stays(before):
    signals = Signals([signal.SIGUSR1])

    def later(*_):
        return None

    signal.signal(signal.SIGUSR1, later)
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_off_the_main_thread_nothing_is_handled_and_that_is_said(before, caplog):
    theirs = signal.getsignal(signal.SIGUSR1)
    with caplog.at_level(logging.WARNING, "tierfs.train"):
        thread = threading.Thread(target=lambda: Signals([signal.SIGUSR1]).close())
        thread.start()
        thread.join()
    assert "SIGUSR1 are not handled" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is theirs


@pytest.fixture
def default():
    """SIGUSR1 ends the process, as in one that handles nothing."""
    old = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, old)


def status_of_child(does):
    """Return how a forked child ends."""
    return os.waitstatus_to_exitcode(in_child(does))


def test_a_signal_ends_a_forked_child(default):
    signals = Signals([signal.SIGUSR1])
    assert status_of_child(lambda: os.kill(os.getpid(), signal.SIGUSR1)) == -signal.SIGUSR1
    assert not signals.received
    signals.close()


def test_signals_work_as_before_in_whatever_order_all_close(default):
    def overlap():
        first, second = Signals([signal.SIGUSR1]), Signals([signal.SIGUSR1])
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGUSR1)

    assert status_of_child(overlap) == -signal.SIGUSR1


def test_a_closed_handler_that_comes_back_passes_signals_on(before):
    first, second = Signals([signal.SIGUSR1]), Signals([signal.SIGUSR1])
    first.close()
    second.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (before, first.received, second.received) == ([signal.SIGUSR1], 0, 0)


@pytest.mark.parametrize("closes", [True, False])
def test_a_signal_that_a_later_handler_notes_ends_nothing(default, closes):
    # A manager over a closed one, and one of a forked child, save before they end.
    first = Signals([signal.SIGUSR1])

    def note():
        second = Signals([signal.SIGUSR1])
        if closes:
            first.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert second.received

    assert status_of_child(note) == 0
    first.close()


def test_an_ignored_signal_stays_ignored_in_a_child(default):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = Signals([signal.SIGUSR1])
    assert status_of_child(lambda: os.kill(os.getpid(), signal.SIGUSR1)) == 0
    signals.close()
