"""Threads, forked and spawned processes, and instances that are sent between them."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from random import Random
from typing import Any

import fsspec
import pytest
from support.forked import answer_of
from support.waiting import HANG_S

import tierfs
from tierfs.errors import StoreError
from tierfs.objects import WrappedObjects
from tierfs.session import open_store, parse_url
from tierfs.store import load, save

MIB = 1 << 20
FILES = 20


def content_of(worker: int, number: int) -> bytes:
    """Return the content of a worker's file. Most are small; one is larger than a chunk."""
    random = Random(1000 * worker + number)
    return 17 * random.randbytes(MIB) if worker == number == 0 else random.randbytes(50_000 * number)


def write_and_read(fs: tierfs.TierFileSystem, root: str, worker: int, files: int = FILES) -> None:
    """Write this worker's files and read each back, in different ways."""
    for number in range(files):
        path = f"{root}/worker-{worker}/{number}"
        fs.pipe(path, content_of(worker, number))
        assert fs.cat(path) == content_of(worker, number)
    assert len(fs.ls(f"{root}/worker-{worker}")) == files
    with fs.open(f"{root}/worker-{worker}/1", "ab") as file:
        file.write(b"more")


def check(fs: tierfs.TierFileSystem, root: str, worker: int, files: int = FILES) -> None:
    for number in range(files):
        expected = content_of(worker, number) + (b"more" if number == 1 else b"")
        assert fs.cat(f"{root}/worker-{worker}/{number}") == expected


def work(fs: tierfs.TierFileSystem, root: str, worker: int) -> None:
    """Run in another process: use the instance that was sent, and a new one."""
    assert fs.cat(f"{root}/shared") == b"shared"
    write_and_read(fs, root, worker, 5)
    own = fsspec.filesystem("tierfs", target_protocol="file")
    check(own, root, worker, 5)


def in_child(call: Callable[[], None]) -> None:
    """Run ``call`` in a forked child. Fail with the child's traceback if it raises."""
    assert answer_of(call) == "None"


# -- threads -----------------------------------------------------------------------------------------------------


def test_eight_threads_write_and_read_fifty_files_each(place):
    def run(worker: int) -> None:
        random = Random(worker)
        for number in range(50):
            data = random.randbytes(random.choice([10, 1000, 70_000]))
            path = place / f"{worker}/{number}"
            with place.fs.open(path, "wb") as file:
                file.write(data)
            assert place.fs.cat(path) == data

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert len(place.names()) == 400


@pytest.mark.parametrize("length", [1000, 300_000])
def test_threads_may_write_to_one_handle(place, length):
    interval = sys.getswitchinterval()
    pieces = {bytes([number]) * length for number in range(1, 161)}
    sys.setswitchinterval(1e-6)
    try:
        with place.fs.open(place / "a", "wb") as handle, ThreadPoolExecutor(8) as pool:
            assert list(pool.map(handle.write, pieces)) == [length] * len(pieces)
    finally:
        sys.setswitchinterval(interval)
    data = place.fs.cat(place / "a")
    assert {data[start : start + length] for start in range(0, len(data), length)} == pieces


def test_a_close_waits_for_the_write_of_another_thread(place, put_between):
    sending, go_on = threading.Event(), threading.Event()

    class Slow(WrappedObjects):
        def put(self, key, *arguments, **options):
            if "/chunks/" in key:
                sending.set()
                assert go_on.wait(HANG_S)
            return super().put(key, *arguments, **options)

    put_between(Slow)
    data = b"".join(bytes([number]) * (16 * MIB) for number in range(6))  # more than may be on the way at once
    handle = place.fs.open(place / "a", "wb")
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(handle.write, data)
        assert sending.wait(HANG_S)
        closed = pool.submit(handle.close)
        with pytest.raises(FutureTimeoutError):
            closed.result(0.2)
        go_on.set()
        assert written.result(HANG_S) == len(data)
        closed.result(HANG_S)
    assert place.fs.cat(place / "a") == data
    with pytest.raises(ValueError, match="closed file"):
        handle.write(b"later")


def test_handles_of_threads_have_their_own_positions(place):
    data = Random(1).randbytes(5 * MIB)
    place.fs.pipe(place / "a", data)

    def run(seed: int) -> None:
        random = Random(seed)
        with place.fs.open(place / "a") as file:
            for _ in range(50):
                at = random.randrange(len(data))
                file.seek(at)
                assert file.read(1000) == data[at : at + 1000]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


def test_an_asynchronous_instance_works_on_the_caller_s_loop(place):
    async def use() -> bytes:
        fs = tierfs.TierFileSystem(target_protocol=place.protocol, asynchronous=True, skip_instance_cache=True)
        await fs._pipe({place / str(number): b"%d" % number for number in range(50)})
        assert len(await fs._find(place.root)) == 50
        assert [name async for name, _, _ in fs._walk(place.root)] == [place.root]
        return b"".join((await fs._cat([place / "7", place / "8"])).values())

    assert asyncio.run(use()) == b"78"


# -- pickling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"create": True}])
def test_an_unpickled_instance_is_the_one_of_this_process(options):
    fs = fsspec.filesystem("tierfs", target_protocol="memory", **options)
    assert pickle.loads(pickle.dumps(fs)) is fs
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) is fs


def test_an_open_file_that_is_not_open_yet_can_be_pickled(place):
    place.fs.pipe(place / "a.gz", b"")
    with fsspec.open(f"{place.url}/a.gz", "w", compression="gzip") as file:
        file.write("text")
    later = pickle.loads(pickle.dumps(fsspec.open(f"{place.url}/a.gz", "r", compression="infer")))
    with later as file:
        assert file.read() == "text"


def test_an_unpickled_read_handle_keeps_its_position(place, random_bytes):
    data = random_bytes(3 * MIB, 1)
    place.fs.pipe(place / "a", data)
    with place.fs.open(place / "a") as file:
        file.seek(MIB + 7)
        file.read(3)
        with pickle.loads(pickle.dumps(file)) as again:
            assert (again.tell(), again.read()) == (MIB + 10, data[MIB + 10 :])
        assert file.tell() == MIB + 10
    for encoding in ("utf-8", "utf-16"):  # a text handle has read ahead
        place.fs.pipe(place / "a", "first\r\nsécond\r\nthird".encode(encoding))
        with fsspec.open(f"{place.url}/a", "r", encoding=encoding) as text:
            assert text.readline() == "first\n"
            with pickle.loads(pickle.dumps(text)) as again:
                assert again.read() == text.read() == "sécond\nthird"


def test_text_handles_of_other_filesystems_are_pickled_by_fsspec(tmp_path):
    (tmp_path / "a").write_text("text")
    with fsspec.open(f"file://{tmp_path}/a", "r") as text, pickle.loads(pickle.dumps(text)) as again:
        assert again.read() == "text"


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_write_handle_cannot_be_pickled(place, mode):
    with fsspec.open(f"{place.url}/a", mode) as file, pytest.raises(TypeError, match="close it first"):
        pickle.dumps(file)
    assert place.fs.cat(place / "a") == b""


# -- processes ---------------------------------------------------------------------------------------------------


def test_a_forked_child_uses_an_inherited_or_own_instance(place):
    place.fs.pipe(place / "shared", b"shared")

    def child() -> None:
        assert place.fs.cat(place / "shared") == b"shared"
        write_and_read(place.fs, place.root, 0, 3)
        check(place.fs, place.root, 0, 3)
        own, path = fsspec.url_to_fs(f"{place.url}/shared")
        assert own.cat(path) == b"shared"
        write_and_read(own, place.root, 1, 3)

    in_child(child)
    if place.protocol == "file":
        for worker in (0, 1):
            check(place.fs, place.root, worker, 3)
    write_and_read(place.fs, place.root, 2, 2)
    check(place.fs, place.root, 2, 2)


def test_a_read_handle_is_of_no_use_in_a_forked_child(place):
    data = 20 * Random(5).randbytes(MIB)
    place.fs.pipe(place / "a", data)
    with place.fs.open(place / "a") as file:
        assert file.read(10) == data[:10]

        def child() -> None:
            with pytest.raises(StoreError, match="was opened before this process was forked"):
                file.read()
            with place.fs.open(place / "a") as again:
                assert again.read() == data

        in_child(child)
        assert file.read() == data[10:]


@pytest.mark.parametrize("way", ["close", "raise", "drop"])
def test_a_forked_child_does_not_publish_its_parents_file(directory_place, way):
    place = directory_place
    data = 40 * Random(6).randbytes(MIB - 1)
    with place.fs.open(place / "a", "wb") as file:
        file.write(data[: 36 * MIB])

        def child() -> None:
            nonlocal file
            if way == "close":
                file.close()
            elif way == "raise":
                with pytest.raises(KeyError), file:
                    raise KeyError
            else:
                with pytest.raises(ValueError, match="forked"):
                    file.write(b"lost?")
                file = None
            assert not place.fs.exists(place / "a")

        in_child(child)
        assert not place.fs.exists(place / "a")
        file.write(data[36 * MIB :])
    assert place.fs.cat(place / "a") == data


def test_a_child_forked_while_threads_write_does_not_hang(directory_place):
    place = directory_place
    stop = threading.Event()

    def keep_writing(worker: int) -> None:
        number = 0
        while not stop.is_set():
            place.fs.pipe(place / f"busy/{worker}/{number % 10}", bytes(100_000))
            number += 1

    threads = [threading.Thread(target=keep_writing, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    try:
        for worker in range(2):
            in_child(lambda worker=worker: write_and_read(place.fs, place.root, worker, 2))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for worker in range(2):
        check(place.fs, place.root, worker, 2)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_a_pool_share_a_store_in_a_directory(directory_place, method):
    place = directory_place
    place.fs.pipe(place / "shared", b"shared")
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for future in [pool.submit(work, place.fs, place.root, worker) for worker in range(4)]:
            future.result(HANG_S)
    for worker in range(4):
        check(place.fs, place.root, worker, 5)
    assert len(place.names()) == 21


def create_exclusively(root: str, worker: int) -> bool:
    try:
        fsspec.filesystem("tierfs", target_protocol="file").pipe_file(f"{root}/once", b"%d" % worker, mode="create")
    except FileExistsError:
        return False
    return True


def test_one_exclusive_create_of_many_processes_wins(directory_place):
    place = directory_place
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("fork")) as pool:
        won = [
            future.result(HANG_S)
            for future in [pool.submit(create_exclusively, place.root, number) for number in range(8)]
        ]
    assert won.count(True) == 1
    assert place.fs.cat(place / "once") == b"%d" % won.index(True)


ROUNDS = 6
RIVALS = 3


def close_at_once(
    root: str, tiers: dict[str, str], mode: str, number: int, begin: threading.Barrier, told: Any
) -> None:
    """Write a file in each round. All processes have it open before any of them closes it."""
    fs = fsspec.filesystem("tierfs", target_protocol="file", **tiers)
    for turn in range(ROUNDS):
        file = fs.open(f"{root}/{turn}/latest", mode)
        file.write(b"%d" % number)
        begin.wait(HANG_S)
        try:
            file.close()
            told.put((turn, "ok"))
        except tierfs.TierfsError as error:
            told.put((turn, type(error).__name__))
        begin.wait(HANG_S)


@pytest.mark.parametrize(("mode", "nvme"), [("wb", "0"), ("wb", "8MiB"), ("xb", "8MiB"), ("ab", "0")])
def test_one_of_many_open_writers_saves_and_the_others_conflict(directory_place, tmp_path, nvme, mode):
    root = directory_place.root
    tiers = {"ack": "staged", "ram": "64MiB", "nvme": nvme, "state_dir": str(tmp_path / "state")}
    context = multiprocessing.get_context("fork")
    begin, told = context.Barrier(RIVALS), context.Queue()
    processes = [
        context.Process(target=close_at_once, args=(root, tiers, mode, number, begin, told)) for number in range(RIVALS)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, list[str]] = {turn: [] for turn in range(ROUNDS)}
    for _ in range(ROUNDS * RIVALS):
        turn, outcome = told.get(timeout=HANG_S)
        outcomes[turn].append(outcome)
    for process in processes:
        process.join(HANG_S)
    lost = "AlreadyExistsError" if mode == "xb" else "ConflictError"
    assert {tuple(sorted(each)) for each in outcomes.values()} == {(lost,) * (RIVALS - 1) + ("ok",)}
    fs = fsspec.filesystem("tierfs", target_protocol="file", **tiers)
    fs.wait(root)
    assert fs.status(root)["conflicts"] == []


def test_a_store_that_crossed_a_fork_says_so(tmp_path) -> None:
    store = tierfs.init(f"file://{tmp_path}/store")
    save(store, "a", b"saved")

    def use() -> None:
        for attempt in (lambda: load(store, "a"), lambda: save(store, "b", b"lost"), lambda: store.tiers):
            with pytest.raises(StoreError, match="was opened before this process was forked"):
                attempt()
        own, path = open_store(parse_url(f"file://{tmp_path}/store/a"))
        assert own is not store
        assert load(own, path) == b"saved"

    in_child(use)
    assert load(store, "a") == b"saved"


def test_a_running_flusher_takes_the_codecs_of_the_newest_writer(tmp_path):
    url, before = f"file://{tmp_path}/store", 0
    tierfs.init(url)
    for number, codecs in enumerate(["off", "all", None, "off"]):
        options = {} if codecs is None else {"codecs": codecs}
        fs = tierfs.TierFileSystem(target_protocol="file", ack="staged", skip_instance_cache=True, **options)
        fs.pipe_file(f"{tmp_path}/store/{number}", b"%d: nothing new\n" % number * 100_000)
        fs.wait(f"{tmp_path}/store/{number}", "object")
        stored = sum(path.stat().st_size for path in tmp_path.glob("store/.tierfs/chunks/*/*"))
        assert (stored - before > 1_500_000) is (codecs == "off"), "a writer that asks for none changes nothing"
        before = stored
