"""An interrupt, or a thread that cannot start, leaves a write complete or absent, and leaks nothing."""

import os
import signal
import threading
import time

import pytest
from support.tiered import MIB, content, save_at
from support.waiting import HANG_S, until

from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.host.slab.table import SlotState
from tierfs.store import Writer, evict, load, save, wait


def dirty(host):
    states = (SlotState.SEALED, SlotState.FILLING)
    return [slot for segment in host.tiers.ram.segments() for slot in segment.slots(states=states)]


def test_an_interrupt_right_after_the_draft_was_sealed_leaves_the_file_pending(host):
    save_at(host.store, "a", b"old", Level.OBJECT)
    data = content(20 * MIB)

    def interrupt(point):
        if point == "after draft.seal":
            raise KeyboardInterrupt

    with host.held():
        writer = Writer(host.store, "a", level=Level.STAGED)
        writer.write(data)
        host.tiers.writer._fault = interrupt
        with pytest.raises(KeyboardInterrupt):
            writer.commit()
        host.tiers.writer._fault = lambda _: None
        assert writer.is_done
        writer.abort()
        assert load(host.store, "a") == data
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor shares nothing out")
def test_an_interrupt_while_other_threads_copy_leaves_nothing(host, monkeypatch):
    held, going, here = threading.Event(), threading.Event(), threading.get_ident()
    seal = host.tiers.writer.seal_chunk

    def slow(chunk, **kwargs):
        if threading.get_ident() != here:
            going.set()
            assert held.wait(HANG_S)
        return seal(chunk, **kwargs)

    def interrupt():
        going.wait(HANG_S)
        time.sleep(0.3)  # by now this thread waits for the others
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        held.set()

    monkeypatch.setattr(host.tiers.writer, "seal_chunk", slow)
    thread = threading.Thread(target=interrupt)
    thread.start()
    writer = Writer(host.store, "a", level=Level.STAGED)
    with pytest.raises(KeyboardInterrupt):
        writer.write(content(64 * MIB))
    thread.join()
    assert not dirty(host)


def test_a_thread_that_cannot_be_started_keeps_nobody_from_telling_the_flusher(host, monkeypatch):
    start, failed = threading.Thread.start, []

    def fail_once(thread):
        if thread.name == "tierfs-announce" and not failed:
            failed.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    for name in "abc":
        save(host.store, name, b"x")
    assert failed
    until(lambda: not host.tiers.drafts.pending_below(""))


def test_a_damaged_copy_is_passed_by_although_the_flusher_cannot_be_told(host, monkeypatch):
    data = content(20 * MIB)
    save_at(host.store, "a", data, Level.LOCAL)
    wait(host.store, "", Level.OBJECT)
    evict(host.store, "", "ram")
    read, request = host.tiers.nvme.read, host.tiers.flusher.request

    def flipped(name, start, out):
        meta = read(name, start, out)
        if meta is not None:
            out[0] ^= 1
        return meta

    def refuse(do, *args, **kwargs):
        if do == "quarantine":
            raise StoreError("the flusher's disk is broken")
        return request(do, *args, **kwargs)

    monkeypatch.setattr(host.tiers.nvme, "read", flipped)
    monkeypatch.setattr(host.tiers.flusher, "request", refuse)
    assert load(host.store, "a") == data
    assert host.tiers.counters["kept_damage"] == 2
