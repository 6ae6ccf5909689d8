"""System calls on a mount: their effects, and the errnos of calls that a store does not support."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

import mounts
import pytest
from mounts import PROGRAM, run

import tierfs

mounts.require()

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
PUNCH_HOLE, KEEP_SIZE = 2, 1
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def path(mounted_s3):
    return mounted_s3


def number_of(call, *arguments, **options):
    """Return the errno of a call that must fail."""
    with pytest.raises(OSError, match=r"Errno") as caught:
        call(*arguments, **options)
    return caught.value.errno


def called(name, *arguments):
    """Call a function of the C library that Python lacks."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def renameat2(old, new, flags):
    called("renameat2", -100, os.fsencode(old), -100, os.fsencode(new), flags)


def fallocate(fd, mode, offset, length):
    called("fallocate", fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def test_what_a_store_cannot_have_is_refused_with_the_errno_that_programs_expect(path):
    file, folder = path / "file", path / "folder"
    file.write_bytes(b"x" * 5000)
    folder.mkdir()
    (folder / "in").write_bytes(b"x")
    assert number_of(os.link, file, path / "link") == errno.EPERM
    assert number_of(os.symlink, file, path / "link") == errno.EPERM
    assert number_of(os.mkfifo, path / "pipe") == errno.EPERM
    assert number_of(os.chown, file, os.getuid() + 1, -1) == errno.EPERM
    assert number_of(os.setxattr, file, "user.mine", b"x") == errno.EOPNOTSUPP
    assert number_of(os.removexattr, file, "user.tierfs.digest") == errno.EOPNOTSUPP
    assert number_of(os.getxattr, file, "user.mine") == errno.ENODATA
    for name in ("security.selinux", "system.posix_acl_access"):
        assert number_of(os.getxattr, file, name) == errno.EOPNOTSUPP, name
    assert number_of(os.mkdir, path / ".tierfs") == errno.EPERM
    assert number_of(os.open, os.fsencode(path) + b"/\xff", os.O_CREAT | os.O_WRONLY) == errno.EILSEQ
    assert number_of(os.open, path / ("x" * 255), os.O_CREAT | os.O_WRONLY) == errno.ENAMETOOLONG
    assert number_of(renameat2, file, folder / "in", RENAME_NOREPLACE) == errno.EEXIST
    assert number_of(renameat2, file, folder / "in", RENAME_EXCHANGE) == errno.EINVAL
    assert number_of(os.rename, folder, folder / "below") == errno.EINVAL
    assert number_of(os.rename, file, folder) == errno.EISDIR
    assert number_of(os.rename, folder, file) == errno.ENOTDIR
    assert number_of(os.rmdir, folder) == errno.ENOTEMPTY
    assert number_of(os.rmdir, file) == errno.ENOTDIR
    assert number_of(os.unlink, folder) == errno.EISDIR
    assert number_of(os.open, folder, os.O_WRONLY) == errno.EISDIR
    assert number_of(os.open, file, os.O_CREAT | os.O_EXCL | os.O_WRONLY) == errno.EEXIST
    assert number_of(os.open, file / "below", os.O_RDONLY) == errno.ENOTDIR
    assert number_of(os.truncate, path / "missing", 0) == errno.ENOENT
    with open(file, "r+b") as opened:
        assert number_of(fallocate, opened.fileno(), PUNCH_HOLE | KEEP_SIZE, 0, 4096) == errno.EOPNOTSUPP
    assert file.read_bytes() == b"x" * 5000
    assert sorted(os.listdir(path)) == ["file", "folder"]


def test_room_is_made_with_and_without_making_the_file_longer(path):
    with open(path / "file", "wb") as file:
        file.write(b"x")
        file.flush()
        fallocate(file.fileno(), KEEP_SIZE, 0, 2_000_000)
        assert os.fstat(file.fileno()).st_size == 1
        os.posix_fallocate(file.fileno(), 0, 2_000_000)
        assert os.fstat(file.fileno()).st_size == 2_000_000
    assert (path / "file").read_bytes() == b"x" + bytes(1_999_999)


def test_a_file_without_a_name_goes_on_and_leaves_nothing(path):
    with open(path / "file", "w+b") as file:
        file.write(b"first")
        file.flush()
        os.unlink(path / "file")
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write(b"second")
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), 8)
        assert os.pread(file.fileno(), 100, 0) == b"firstsec"
        (path / "file").write_bytes(b"another")
    assert os.listdir(path) == ["file"]
    assert (path / "file").read_bytes() == b"another"


def test_reads_and_writes_past_the_cache_are_those_that_others_see(path):
    data = random.Random(1).randbytes(3 << 20)
    buffer = mmap.mmap(-1, 1 << 20)
    fd = os.open(path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    for offset in range(0, len(data), 1 << 20):
        buffer[:] = data[offset : offset + (1 << 20)]
        assert os.pwrite(fd, buffer, offset) == 1 << 20
    assert (path / "file").read_bytes() == data
    with open(path / "file", "r+b") as other:
        other.write(b"changed")
        other.flush()
        assert os.preadv(fd, [buffer], 0) == 1 << 20
    assert buffer[:10] == b"changed" + data[7:10]
    os.close(fd)


def test_a_lock_keeps_another_program_out(path):
    (path / "file").write_bytes(b"x")
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(path / "file", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = subprocess.run([sys.executable, "-c", program, path / "file"], capture_output=True, check=False)
        assert b"BlockingIOError" in held.stderr
    run(sys.executable, "-c", program, path / "file")


def test_attributes_tell_where_a_file_is(path):
    content = b"x" * 3_000_000
    (path / "file").write_bytes(content)
    names = ["digest", "level", "stored", "tier"]
    assert sorted(os.listxattr(path / "file")) == [f"user.tierfs.{name}" for name in names]
    values = {name: os.getxattr(path / "file", f"user.tierfs.{name}").decode() for name in names}
    assert len(values["digest"]) == 32
    assert values["level"] in {"staged", "local", "object"}
    assert values["tier"] == "ram"
    ends = time.monotonic() + 30
    while os.getxattr(path / "file", "user.tierfs.level") != b"object":
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert 0 < int(os.getxattr(path / "file", "user.tierfs.stored")) < len(content)
    (path / "same").write_bytes(content)
    assert os.getxattr(path / "same", "user.tierfs.digest").decode() == values["digest"]
    with open(path / "open", "wb") as file:
        file.write(b"x")
        file.flush()
        assert os.getxattr(path, "user.tierfs.pending") == b"open"
    room = os.statvfs(path)
    assert room.f_blocks * room.f_frsize == 256 << 20  # the budget of the nvme tier
    assert 0 < room.f_bavail <= room.f_blocks


def test_modes_and_times_are_kept_through_a_remount(hosts, local):
    host = hosts(local, ack="object")
    path = host.start()
    (path / "folder").mkdir(0o750)
    (path / "folder" / "file").write_bytes(b"x")
    os.chmod(path / "folder" / "file", 0o640)
    os.utime(path / "folder" / "file", ns=(1, 1_600_000_000_123_456_789))
    host.remount()
    status = os.stat(path / "folder" / "file")
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 1_600_000_000_123_456_789)
    assert stat.S_IMODE(os.stat(path / "folder").st_mode) == 0o750


def test_a_listing_has_every_name_once_while_others_come_and_go(mounted):
    for number in range(40):
        (mounted / f"stays-{number:03}").write_bytes(b"x")
    stop = threading.Event()

    def work():
        number = 0
        while not stop.is_set():
            number += 1
            (mounted / f"comes-{number % 7}").write_bytes(b"x")
            (mounted / f"comes-{(number + 3) % 7}").unlink(missing_ok=True)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(6):
            names = os.listdir(mounted)
            assert len(names) == len(set(names))
            assert sum(name.startswith("stays-") for name in names) == 40
    finally:
        stop.set()
        worker.join()


def test_a_mount_that_is_read_only_changes_nothing(hosts, local):
    host = hosts(local, ack="object")
    (host.start() / "file").write_bytes(b"x" * 100)
    host.mount.close()
    path = host.start(read_only=True)
    assert (path / "file").read_bytes() == b"x" * 100
    for change in (
        lambda: (path / "file").write_bytes(b"y"),
        lambda: (path / "new").write_bytes(b"y"),
        (path / "file").unlink,
        lambda: (path / "file").rename(path / "other"),
        (path / "folder").mkdir,
        lambda: (path / "file").chmod(0o600),
    ):
        assert number_of(change) == errno.EROFS
    host.mount.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_mount_in_the_foreground_ends_with_a_signal(tmp_path, local, number):
    path = tmp_path / "mnt"
    path.mkdir()
    heard = ["env", "--default-signal=HUP"]  # a mount that is started by nohup ignores it
    server = subprocess.Popen([*heard, *PROGRAM, "mount", "--foreground", "--ack", "object", local, str(path)])
    ends = time.monotonic() + 30
    while not os.path.ismount(path):
        assert server.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)
    (path / "file").write_bytes(b"x")
    server.send_signal(number)
    assert server.wait(30) == 0
    assert not os.path.ismount(path)
    assert run(*PROGRAM, "cat", f"{local}/file") == "x"


def test_a_directory_where_nothing_can_be_mounted_says_why(tmp_path, local, hosts):
    path = hosts(local).start()
    file = tmp_path / "file"
    file.write_bytes(b"")
    for directory, words in (
        (path, "already mounted"),
        (file, "not a directory"),
        (tmp_path / "missing", "does not exist"),
    ):
        done = subprocess.run([*PROGRAM, "mount", local, str(directory)], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert words in done.stderr


def test_umount_of_a_mount_with_open_files_says_so(hosts, local):
    host = hosts(local)
    path = host.start()
    (path / "file").write_bytes(b"x")
    with open(path / "file", "rb"):
        done = subprocess.run([*PROGRAM, "umount", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 8
        assert "in use" in done.stderr
    run(*PROGRAM, "umount", path)
    assert not os.path.ismount(path)


BY_SOMEBODY = """
import os, sys, tierfs
from tierfs.session import init

base, data = sys.argv[1], os.urandom(20 << 20)
init(f"file://{base}/store")
os.mkdir(f"{base}/mnt")
with tierfs.mount(f"file://{base}/store", f"{base}/mnt", state_dir=f"{base}/state", ram="64MiB", nvme="0"):
    with open(f"{base}/mnt/a", "wb") as file:
        file.write(data)
    os.rename(f"{base}/mnt/a", f"{base}/mnt/b")
    with open(f"{base}/mnt/b", "rb") as file:
        assert file.read() == data
    print(os.listdir(f"{base}/mnt"), os.stat(f"{base}/mnt/b").st_uid, os.getuid())
assert not os.path.ismount(f"{base}/mnt")
"""


def test_a_user_who_is_not_root_mounts_too():
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    root = os.path.dirname(os.path.dirname(tierfs.__file__))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}

    def python(code, *words):
        command = [sys.executable, "-c", code, *words]
        options = {"env": environment, "cwd": "/", "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(command, check=False, **options, **nobody)

    try:
        can = python("import os, tierfs; os.open('/dev/fuse', os.O_RDWR)").returncode == 0
    except PermissionError:
        can = False
    if not can or shutil.which("fusermount3") is None:
        pytest.skip("another user than root cannot run this Python, open /dev/fuse, or find fusermount3")
    with tempfile.TemporaryDirectory() as base:
        if nobody:
            os.chown(base, 65534, 65534)
        environment |= {"TIERFS_STATE_DIR": f"{base}/state", "HOME": base}
        done = python(BY_SOMEBODY, base)
        assert done.returncode == 0, done.stderr
        user = nobody.get("user", os.getuid())
        assert done.stdout.split("\n")[0] == f"['b'] {user} {user}"
