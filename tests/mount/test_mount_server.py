"""Requests as the kernel sends them, over a socket: errors, hanging handlers, unsupported operations."""

import errno
import os
import socket
import struct
import threading
import time

import pytest
from support.mount_hand import Hand
from support.waiting import HANG_S, until

from tierfs.clock import SystemClock
from tierfs.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.mount import process, wire
from tierfs.mount.process import refuse_own_places
from tierfs.mount.requests import FLUSH
from tierfs.mount.server import Server
from tierfs.mount.wire import Opcode, Valid, errno_of
from tierfs.session import init, open_store, parse_url
from tierfs.testing.faults import Fault, FaultyObjects, PlannedFault


class Kernel:
    def __init__(self, make_server):
        self.ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.its = its
        self.server = make_server(its.fileno())
        self.unique = 0
        self.server.start()

    def send(self, opcode, node=1, body=b""):
        self.unique += 1
        self.ours.send(struct.pack("<IIQQIIII", 40 + len(body), opcode, self.unique, node, 0, 0, 0, 0) + body)
        return self.unique

    def answer(self):
        data = self.ours.recv(1 << 21)
        length, error, unique = wire.OUT_HEADER.unpack_from(data)
        assert length == len(data)
        return unique, -error, data[16:]

    def ask(self, *arguments, **options):
        unique = self.send(*arguments, **options)
        found = self.answer()
        assert found[0] == unique
        return found[1:]

    def close(self):
        self.ours.close()
        assert self.server.ended.wait(HANG_S)
        # Otherwise a thread might read from the next file with this descriptor number.
        until(lambda: "(0 threads" in repr(self.server))
        self.its.close()


@pytest.fixture
def kernel_of():
    kernels = []

    def make(make_server):
        kernels.append(Kernel(make_server))
        return kernels[-1]

    yield make
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel_for(kernel_of):
    return lambda serve, **options: kernel_of(lambda device: Server(device, serve, **options))


def test_an_error_is_an_errno_and_the_mount_goes_on(kernel_for):
    errors = iter([NotFoundError("gone"), RuntimeError("odd"), SystemExit(3), KeyError("x")])

    def serve(header, body):
        error = next(errors, None)
        if error is not None:
            raise error
        return b"fine"

    kernel = kernel_for(serve)
    assert [kernel.ask(Opcode.GETATTR) for _ in range(5)] == [
        (errno.ENOENT, b""),
        (errno.EIO, b""),
        (errno.EIO, b""),
        (errno.EIO, b""),
        (0, b"fine"),
    ]


def test_a_request_that_hangs_is_answered_with_eio_and_others_go_on(kernel_for):
    hang = threading.Event()

    def serve(header, body):
        if header.opcode == Opcode.READ:
            hang.wait(HANG_S)
        return b"fine"

    kernel = kernel_for(serve, timeout_s=0.3)
    hanging = [kernel.send(Opcode.READ) for _ in range(40)]
    answered = kernel.send(Opcode.GETATTR)
    answers = [kernel.answer() for _ in range(41)]
    assert (answered, 0, b"fine") in answers
    assert sorted(unique for unique, number, _ in answers if number == errno.EIO) == hanging
    hang.set()
    assert kernel.ask(Opcode.READ) == (0, b"fine")


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Opcode.UNLINK, b"file\0"),
        (Opcode.RMDIR, b"folder\0"),
        (Opcode.MKDIR, struct.pack("<II", 0o755, 0) + b"new\0"),
        (Opcode.RENAME, struct.pack("<Q", 1) + b"file\0moved\0"),
        (Opcode.RENAME, struct.pack("<Q", 1) + b"folder\0moved\0"),
    ],
)
def test_an_abandoned_request_changes_nothing_later(kernel_of, hand, tmp_path, caplog, opcode, body):
    store = hand.state.store
    if store.tiers is not None:
        pytest.skip("what is staged here needs no object tier")
    hand.write_file("file", b"x")
    hand.tree.make_directory(*hand.parent("folder"), 0o755)
    slow = [PlannedFault(Fault.SLOW, seconds=1.5)]
    store._objects = FaultyObjects(store.objects, slow, clock=SystemClock())
    kernel = kernel_of(lambda device: process.served(hand.state, device, 0.05)[1])
    assert kernel.ask(opcode, body=body) == (errno.EIO, b"")
    while "0 lost" not in repr(kernel.server):
        time.sleep(0.01)
    assert f"of {store.url}/" in caplog.text
    assert Hand(store, tmp_path).names() == ["file", "folder"]


def test_many_requests_that_wait_keep_no_other_one_waiting(kernel_for):
    hang = threading.Event()

    def serve(header, body):
        if header.opcode == Opcode.READ:
            hang.wait(HANG_S)
        return b"fine"

    kernel = kernel_for(serve)
    waiting = [kernel.send(Opcode.READ) for _ in range(60)]
    answered = kernel.send(Opcode.GETATTR)
    assert kernel.answer() == (answered, 0, b"fine")
    hang.set()
    assert sorted(kernel.answer()[0] for _ in waiting) == waiting


def test_forget_requests_get_no_answer(kernel_for):
    kernel = kernel_for(lambda header, body: None if header.opcode == Opcode.FORGET else b"fine")
    kernel.send(Opcode.FORGET)
    unique = kernel.send(Opcode.GETATTR)
    assert kernel.answer()[0] == unique


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (ConflictError("x"), errno.ESTALE),
        (CapacityError("x"), errno.ENOSPC),
        (ReadOnlyError("x"), errno.EACCES),
        (NotFoundError("x"), errno.ENOENT),
        (InvalidInputError("x"), errno.EINVAL),
        (CorruptionError("x"), errno.EIO),
        (StoreError("x", transient=True), errno.EIO),
        (TimeoutError("x"), errno.EIO),
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC),
        ("\udc80".encode, errno.EILSEQ),
    ],
)
def test_errors_have_the_errno_that_programs_expect(error, number):
    if callable(error):
        with pytest.raises(UnicodeError) as caught:
            error()
        error = caught.value
    assert errno_of(error, "x") == number


def test_requests_of_the_kernel_are_understood(hand):
    # Make, write, list and read a file by raw requests alone.
    requests = hand.requests

    def ask(opcode, node=1, body=b""):
        header = wire.RequestHeader(40 + len(body), opcode, 1, node, 0, 0, 0, 0)
        answer = requests(header, memoryview(body))
        if answer is not None and not isinstance(answer, bytes):
            data = b"".join(bytes(view) for view in answer)
            answer.release()
            return data
        return answer

    assert struct.unpack_from("<II", ask(Opcode.INIT, 0, struct.pack("<IIII", 7, 45, 131072, 0xFFFFFFFF))) == (7, 31)
    with pytest.raises(ValueError, match=r"7\.31"):
        ask(Opcode.INIT, 0, struct.pack("<IIII", 7, 20, 131072, 0))
    with pytest.raises(NotFoundError):  # an entry with node 0 would be remembered by the kernel
        ask(Opcode.LOOKUP, 1, b"a\0")
    created = ask(Opcode.CREATE, 1, struct.pack("<IIII", os.O_RDWR | os.O_CREAT, 0o100666, 0o022, 0) + b"a\0")
    node, handle = struct.unpack_from("<Q", created)[0], struct.unpack_from("<Q", created, 128)[0]
    assert struct.unpack_from("<I", created, 40 + 60)[0] == 0o100644
    written = ask(Opcode.WRITE, node, struct.pack("<QQIIQII", handle, 0, 5, 0, 0, 0, 0) + b"hello")
    assert struct.unpack_from("<I", written)[0] == 5
    ask(Opcode.FLUSH, node, struct.pack("<QIIQ", handle, 0, 0, 0))
    ask(Opcode.RELEASE, node, struct.pack("<QIIQ", handle, 0, 0, 0))
    directory = struct.unpack_from("<Q", ask(Opcode.OPENDIR, 1, bytes(8)))[0]
    page = ask(Opcode.READDIRPLUS, 1, struct.pack("<QQIIQII", directory, 0, 4096, 0, 0, 0, 0))
    assert b"a" in page
    assert len(page) == 3 * (128 + 32)
    assert ask(Opcode.READDIR, 1, struct.pack("<QQIIQII", directory, 3, 4096, 0, 0, 0, 0)) == b""
    opened = struct.unpack_from("<Q", ask(Opcode.OPEN, node, struct.pack("<II", os.O_RDONLY, 0)))[0]
    assert ask(Opcode.READ, node, struct.pack("<QQIIQII", opened, 1, 3, 0, 0, 0, 0)) == b"ell"
    digest = ask(Opcode.GETXATTR, node, struct.pack("<II", 200, 0) + b"user.tierfs.digest\0")
    assert digest.decode() == hand.node("a").entry.manifest.digest.hex()
    with pytest.raises(OSError) as caught:
        ask(Opcode.GETXATTR, node, struct.pack("<II", 0, 0) + b"security.capability\0")
    assert caught.value.errno == errno.EOPNOTSUPP
    for opcode in (Opcode.SYMLINK, Opcode.LINK):
        with pytest.raises(PermissionError) as caught:
            ask(opcode, 1, b"a\0b\0")
        assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError) as caught:
        ask(Opcode.LOOKUP, 1, b"\xff\0")
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(OSError) as caught:
        ask(47, 1)  # COPY_FILE_RANGE
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize("name", ["file", "folder"])
@pytest.mark.parametrize("valid", [Valid.UID, Valid.GID, Valid.UID | Valid.MODE])
def test_another_owner_is_refused(hand, name, valid):
    hand.write_file("file", b"x")
    hand.tree.make_directory(*hand.parent("folder"), 0o755)
    node = hand.node(name)

    def own(uid, gid):
        body = struct.pack("<IIQQQQQQIIIIIIII", valid, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0o700, 0, uid, gid, 0)
        hand.requests(wire.RequestHeader(128, Opcode.SETATTR, 1, node.id, 0, 0, 0, 0), memoryview(body))

    with pytest.raises(PermissionError) as caught:
        own(os.getuid() + 1, os.getgid() + 1)
    assert caught.value.errno == errno.EPERM
    own(os.getuid(), os.getgid())


def test_a_request_for_a_file_that_is_being_stored_has_as_much_time(kernel_for):
    stored = threading.Event()

    def serve(header, body):
        if header.node == 5 and header.opcode != Opcode.GETATTR:
            stored.wait(HANG_S)
        return b"fine"

    kernel = kernel_for(serve, timeout_s=0.2, slow_timeout_s=20)
    kernel.send(Opcode.FSYNC, node=5)
    kernel.send(Opcode.WRITE, node=5)
    other = kernel.send(Opcode.READ, node=6)
    assert kernel.answer() == (other, 0, b"fine")
    threading.Timer(1.2, stored.set).start()
    assert [kernel.answer()[1] for _ in range(2)] == [0, 0]


def test_a_flush_may_take_as_long_as_umount_says(kernel_of, hand, monkeypatch):
    monkeypatch.setattr(process.verbs, "wait", lambda *_: time.sleep(1.5))
    kernel = kernel_of(lambda device: process.served(hand.state, device, 0.05)[1])
    value = b"5.0"
    body = struct.pack("<II", len(value), 0) + FLUSH.encode() + b"\0" + value
    assert kernel.ask(Opcode.SETXATTR, body=body) == (0, b"")


def test_a_mount_does_not_hide_what_it_reads_itself(tmp_path):
    init(f"file://{tmp_path}/store")
    hand = Hand(open_store(parse_url(f"file://{tmp_path}/store"))[0], tmp_path / "staging")
    for place in ("store", "store/below", "staging", "."):
        with pytest.raises(InvalidInputError, match="cannot mount on"):
            refuse_own_places(hand.state, tmp_path / place)
    refuse_own_places(hand.state, tmp_path / "mnt")
