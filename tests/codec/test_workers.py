"""Processes that encode for another one make the same of blocks as that would, and whatever becomes of them, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.encoded import encoded_chunk

from tierfs.buffers import Buffers, buffers, fresh
from tierfs.codec import Codec, Coding, Reason, worker, workers
from tierfs.codec.workers import EncodeWorkers, Job, encode_workers
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import InvalidInputError
from tierfs.sharedmemory import SharedMemory, shared_memory
from tierfs.store.encode.desks import Desks, desks
from tierfs.store.encode.pipeline import EncodedBlock, Plan

BLOCKS = 9
PLANS = [
    *[(Codec.PLANE, 4)] * 3,
    *[(Codec.DPLANE, 4)] * 2,
    *[(Codec.STORE, 1), (Codec.SPARSE, 4), (Codec.ZSTD, 1), (Codec.DERIVE, 2)],
]
DEADLINE_S = 60


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children() -> list[int]:
    """Those of them that this process has; it may have other children, of other tests."""
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if is_one(int(pid))]


def is_one(pid: int) -> bool:
    try:
        return b"tierfs.codec.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def copied(array: np.ndarray) -> memoryview:
    """In memory that is shared, if any is."""
    found = fresh(array.nbytes)
    found[:] = memoryview(array).cast("B")
    return found


class Chunk:
    """A chunk of numbers, with plans of all kinds."""

    def __init__(self, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        numbers = rng.normal(0, 0.02, BLOCKS * BLOCK_BYTES // 4 - 1000).astype("<f4")
        near = numbers + rng.normal(0, 1e-6, numbers.size).astype("<f4")
        near[5 * BLOCK_BYTES // 4 :] = numbers[5 * BLOCK_BYTES // 4 :]
        near[6 * BLOCK_BYTES // 4 :: 100] += 1
        near[7 * BLOCK_BYTES // 4 : 8 * BLOCK_BYTES // 4] = 0
        near[7 * BLOCK_BYTES // 4 : 8 * BLOCK_BYTES // 4 : 50] = 1
        wide = rng.integers(1, 100, BLOCK_BYTES // 2).astype("<f4")
        derived = near[8 * BLOCK_BYTES // 4 :].view("<u2")
        derived[:] = wide[: derived.size].view("<u4") >> 16
        self.raw, self.base, self.wide = copied(near), copied(numbers), copied(wide)

    def plans(self) -> Iterator[Plan]:
        for number, (codec, width) in enumerate(PLANS):
            block = self.base[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            base = {1: block, 2: self.wide[: 2 * len(block)], 0: None}[codec.base_factor]
            yield Plan(Coding(codec, width), Reason(number % 3), base)

    def encode(self) -> list[tuple[Codec, Reason, bytes]]:
        return copies(encoded_chunk(self.raw, self.plans()))


def copies(blocks: list[EncodedBlock]) -> list[tuple[Codec, Reason, bytes]]:
    return [(codec, reason, bytes(data)) for codec, reason, data in blocks]


@pytest.fixture
def own() -> list[tuple[Codec, Reason, bytes]]:
    """What this process makes of it by itself."""
    return Chunk().encode()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncodeWorkers]:
    """Two of them, that work."""
    with allowed(monkeypatch) as found:
        with found.lend(1):
            pass
        wait_until(lambda: found.status().get("workers") == 2)
        yield found


@contextlib.contextmanager
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncodeWorkers]:
    monkeypatch.setattr(workers, "START_BYTES", 1)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(encode_workers, "shared", EncodeWorkers())
    monkeypatch.setattr(desks, "shared", Desks())  # what there is is not shared
    monkeypatch.setattr(buffers, "shared", Buffers())
    before = set(children())
    with encode_workers().allowed():
        yield encode_workers()
    assert set(children()) <= before
    assert not shared_memory().is_on


def test_they_make_the_same_of_every_block(own, started) -> None:
    assert {codec for codec, _, _ in own} == {Codec.STORE, *(codec for codec, _ in PLANS)}
    for _ in range(3):
        assert Chunk().encode() == own
    assert started.status() == {"workers": 2, "worker_blocks": 3 * (BLOCKS - 1)}


def test_what_is_not_shared_or_small_is_encoded_here(own, started, monkeypatch) -> None:
    monkeypatch.setattr(shared_memory(), "is_on", False)
    assert Chunk().encode() == own
    small = copied(np.random.default_rng(2).normal(0, 1, 1000).astype("<f4"))
    (block,) = encoded_chunk(small, [Plan(Coding(Codec.PLANE, 4), Reason.NO_BASE)])
    assert block.codec == Codec.PLANE
    assert started.status()["worker_blocks"] == 0


def test_they_begin_when_there_is_enough_to_do(own, monkeypatch) -> None:
    with allowed(monkeypatch) as found:
        monkeypatch.setattr(workers, "START_BYTES", 2 * len(Chunk().raw))
        assert Chunk().encode() == own
        stored = [Plan(Coding(Codec.STORE), Reason.LINK_IS_FASTER)] * BLOCKS
        assert [block.codec for block in encoded_chunk(Chunk().raw, stored)] == [Codec.STORE] * BLOCKS
        assert (found.status(), found._is_started) == ({"workers": 0}, False)
        assert Chunk().encode() == own
        wait_until(lambda: found.status().get("workers") == 2)


def test_on_one_processor_there_are_none(own, monkeypatch) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(workers, "START_BYTES", 1)
    monkeypatch.setattr(encode_workers, "shared", EncodeWorkers())
    with encode_workers().allowed():
        assert (encode_workers().count, shared_memory().is_on, encode_workers().status()) == (0, False, {})
        assert Chunk().encode() == own
        assert not encode_workers()._is_started


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_lost_is_replaced(own, started, caplog, how) -> None:
    lost = started._free[-1]
    lost._socket.settimeout(0.2)
    os.kill(lost._process.pid, how)
    assert Chunk().encode() == own
    assert started.status()["worker_deaths"] == 1
    assert "a process that encodes was lost" in caplog.text
    wait_until(lambda: started.status()["workers"] == 2)
    assert lost._process.pid not in children()
    assert Chunk().encode() == own
    assert started.status()["worker_blocks"] == BLOCKS - 1


def test_one_that_is_lost_with_its_work_half_done_is_no_loss(own, started) -> None:
    chunk = Chunk()

    def plans() -> Iterator[Plan]:
        for number, plan in enumerate(chunk.plans()):
            if number == 4:
                for pid in children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            yield plan

    assert copies(encoded_chunk(chunk.raw, plans())) == own
    assert started.status()["worker_deaths"] == 1


def test_after_too_many_this_process_goes_on_alone(own, started) -> None:
    for _ in range(20):
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert Chunk().encode() == own
        if started.status()["workers"] == 0:
            break
        time.sleep(0.3)
    deaths = started.status()["worker_deaths"]
    assert (started.status()["workers"], deaths) == (0, deaths)
    assert workers.DEATHS_MAX <= deaths <= workers.DEATHS_MAX + 2
    assert Chunk().encode() == own


def test_who_gives_up_half_way_leaves_no_answer_to_the_next(own, started) -> None:
    chunk = Chunk()

    def plans() -> Iterator[Plan]:
        for number, plan in enumerate(chunk.plans()):
            if number == 5:
                raise KeyError("the base is gone")
            yield plan

    for _ in range(3):
        with pytest.raises(KeyError):
            encoded_chunk(chunk.raw, plans())
    assert all(not each._begun for each in started._free)
    assert Chunk().encode() == own
    assert "worker_deaths" not in started.status()


def test_what_cannot_be_encoded_is_an_error_here(started) -> None:
    raw = copied(np.ones(2 * BLOCK_BYTES, np.uint8) * 7)
    raw[5] = 0
    plans = [Plan(Coding(Codec.DPLANE, 4), Reason.DELTA, None)] * 2
    with pytest.raises(Exception, match="with a base of 0"):
        encoded_chunk(raw, plans)
    assert started.status()["worker_deaths"] == 1  # nothing that one could not do goes unseen


def test_memory_that_is_gone_is_given_back_by_them(started) -> None:
    with started.lend(1) as lent:
        assert lent is not None
        for _ in range(6):
            raw, out = copied(np.arange(BLOCK_BYTES // 4, dtype="<u4")), fresh(BLOCK_BYTES)
            assert lent.begin(Job([raw], Coding(Codec.PLANE, 4), [None], [out]))
            found = lent.finish()
            assert found is not None
            assert found[0][0] == Codec.PLANE
        maps = Path(f"/proc/{lent._process.pid}/maps").read_text()
    assert 2 <= maps.count("tierfs-work") <= 4  # those of the last job, and of the one before
    assert len(shared_memory().descriptors()) <= 3


def cannot_receive() -> None:
    raise MemoryError


def test_what_is_raised_while_it_is_waited_for_leaves_no_answer_to_the_next(own, started, monkeypatch) -> None:
    monkeypatch.setattr(started._free[-1], "_receive", cannot_receive)
    with pytest.raises(MemoryError):
        Chunk(2).encode()
    assert started.status()["worker_deaths"] == 1
    for _ in range(3):
        assert Chunk().encode() == own


def test_one_that_was_left_with_work_is_ended_unless_it_finishes_that(own, started, monkeypatch) -> None:
    chunk, used = Chunk(), started._free[-1]

    def plans() -> Iterator[Plan]:
        for number, plan in enumerate(chunk.plans()):
            if number == 7:
                monkeypatch.setattr(used, "_receive", cannot_receive)
                raise KeyError("the base is gone")
            yield plan

    with pytest.raises(KeyError):
        encoded_chunk(chunk.raw, plans())
    assert used._begun
    assert used not in started._free
    assert started.status()["worker_deaths"] == 1
    for _ in range(3):
        assert Chunk().encode() == own


def test_one_that_cannot_map_what_it_is_sent_is_replaced(own, started) -> None:
    for each in started._free:
        resource.prlimit(each._process.pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    for _ in range(3):
        assert Chunk().encode() == own
    assert started.status()["worker_deaths"] == 1  # the new one is taken from then on
    assert started.status()["worker_blocks"] > 0


@pytest.mark.parametrize("reason", ["no memfd", "strict overcommit"])
def test_where_memory_cannot_be_shared_there_are_none(own, monkeypatch, tmp_path, reason) -> None:
    if reason == "no memfd":
        monkeypatch.setattr(SharedMemory, "allocate", lambda *_: None)
    else:
        (tmp_path / "overcommit").write_text("2\n")
        monkeypatch.setattr(workers, "_OVERCOMMIT", tmp_path / "overcommit")
    with allowed(monkeypatch) as found:
        assert (found.count, shared_memory().is_on) == (0, False)
        assert Chunk().encode() == own


def test_where_some_bases_are_missing_it_says_so(started) -> None:
    chunk = Chunk()
    plans = [plan._replace(base=None) if number == 4 else plan for number, plan in enumerate(chunk.plans())]
    with pytest.raises(InvalidInputError, match="with a base of 0"):
        encoded_chunk(chunk.raw, plans)


def test_one_that_answers_something_else_is_not_believed(own, started) -> None:
    for each in started._free:
        each._begun.append(99)
    assert Chunk().encode() == own
    assert started.status()["worker_deaths"] == 1


def test_one_of_another_version_is_not_used(own, monkeypatch, caplog) -> None:
    monkeypatch.setattr(workers, "__version__", "0.0.0")
    with allowed(monkeypatch) as found:
        assert Chunk().encode() == own
        wait_until(lambda: found.status().get("worker_deaths") == 2)
        assert found.status() == {"workers": 0, "worker_deaths": 2}
        assert Chunk().encode() == own
    assert "another version" in caplog.text


def test_they_end_with_the_process_they_are_for() -> None:
    code = """
import os, sys, time
from tierfs.codec import workers
workers.START_BYTES = 1
workers.os.sched_getaffinity = lambda _: {0, 1}
found = workers.encode_workers()
with found.allowed():
    with found.lend(1):
        pass
    while found.status().get("workers") != 2:
        time.sleep(0.01)
    print(*[each._process.pid for each in found._free], flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # not for them
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_has_no_more_loaded_than_it_needs() -> None:
    code = f"import {worker.__name__}, sys; print(sorted(name for name in sys.modules if name.startswith('tierfs.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "tierfs.codec.blocks" in loaded
    assert not any(name in loaded for name in ("tierfs.store", "tierfs.objects", "tierfs.flush", "tierfs.fs"))
