"""A host is a state directory. A process of the host counts as alive exactly as long as it runs."""

import contextlib
import errno
import gc
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.forked import answer_of, forked, idle_child
from support.opened import descriptors, no_descriptors_left
from support.waiting import HANG_S, until

from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError, TierfsError
from tierfs.host.filesystems import entries_of, make_private
from tierfs.host.host import ExclusiveLock, Host, state_directory
from tierfs.host.segment_folder import unused_folders
from tierfs.host.slab.budget import RamBudget

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def shm(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def host(directory, shm):
    return Host(directory, shm)


@pytest.fixture
def start(directory, shm):
    """Start another process that creates its own ``host``, runs code, prints a line, and waits until its input ends."""
    with contextlib.ExitStack() as stack:

        def run(code):
            script = (
                "import os, sys; from pathlib import Path; from tierfs.host.host import Host, ExclusiveLock\n"
                f"host = Host(Path({str(directory)!r}), Path({str(shm)!r}))\n{code}\nsys.stdin.read()"
            )
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            return process, process.stdout.readline().strip()

        yield run


# -- liveness ----------------------------------------------------------------------------------------------------------


def test_a_process_has_one_id_and_is_alive(host):
    owner = host.owner()
    assert re.fullmatch("[0-9a-f]{16}", owner)
    assert host.owner() == owner
    assert host.is_alive(owner)


def test_threads_that_ask_at_once_get_one_id(host):
    barrier = threading.Barrier(8)
    found = []

    def ask():
        barrier.wait()
        found.append(host.owner())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(os.listdir(host.directory / "processes")) == 1


def test_two_processes_have_two_ids_and_see_each_other_alive(host, start):
    _, other = start("print(host.owner(), flush=True)")
    _, seen = start(f"print(host.is_alive({host.owner()!r}), host.is_alive({other!r}), flush=True)")
    assert other != host.owner()
    assert host.is_alive(other)
    assert seen == "True True"


def test_a_killed_process_is_dead(host, start):
    process, other = start("print(host.owner(), flush=True)")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not host.is_alive(other)


def test_a_process_that_ended_is_dead_and_prints_nothing(directory, shm, host):
    script = (
        "from pathlib import Path; from tierfs.host.host import Host\n"
        f"host = Host(Path({str(directory)!r}), Path({str(shm)!r})); print(host.owner())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stderr
    assert not host.is_alive(done.stdout.strip())


def test_asking_disturbs_neither_the_living_nor_those_who_ask(host, start):
    _, other = start("print(host.owner(), flush=True)")
    ended, dead = start("print(host.owner(), flush=True)")
    ended.kill()
    ended.wait()
    answers = []

    def ask():
        for _ in range(300):
            answers.append((host.is_alive(other), host.is_alive(dead)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {(True, False)}
    assert len(answers) == 1200


def test_a_forked_child_has_its_own_id(host):
    owner = host.owner()
    child, parent_alive, again = answer_of(
        lambda: " ".join([host.owner(), str(host.is_alive(owner)), host.owner()])
    ).split()
    assert child != owner
    assert (parent_alive, again) == ("True", child)
    assert not host.is_alive(child)
    assert host.is_alive(owner)


def test_a_forked_child_does_not_keep_its_dead_parent_alive(host, start):
    process, line = start(
        "owner = host.owner()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(owner, host.owner(), flush=True)\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    parent, child = line.split()
    assert host.is_alive(parent)
    process.send_signal(signal.SIGKILL)
    until(lambda: not host.is_alive(parent))
    assert host.is_alive(child)
    process.stdin.close()
    until(lambda: not host.is_alive(child))


def test_a_program_that_was_executed_does_not_keep_its_parent_alive(host, start):
    process, owner = start(
        "import subprocess; child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "print(host.owner() + ' ' + str(child.pid), flush=True)"
    )
    owner, child = owner.split()
    try:
        process.kill()
        process.wait()
        assert not host.is_alive(owner)
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_forks_do_not_keep_locks_of_another_thread(directory, shm):
    stop = threading.Event()
    host = Host(directory, shm)
    owner = host.owner()

    def work(host):
        while not stop.is_set():
            with host.locked("ram"):
                pass

    threads = [threading.Thread(target=work, args=[host]) for _ in range(2)]
    for thread in threads:
        thread.start()
    children = []
    try:
        for _ in range(20):
            children.append(forked(signal.pause))
        stop.set()
        for thread in threads:
            thread.join()
        # The children live, and hold no lock of the parent.
        assert ExclusiveLock(directory / "ram.lock").acquire()
        assert host.is_alive(owner)
        del host
        gc.collect()
        assert not Host(directory, shm).is_alive(owner)
    finally:
        stop.set()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_process_without_its_host_is_dead(directory, shm):
    first, second = Host(directory, shm), Host(directory, shm)
    owner = first.owner()
    assert second.owner() != owner
    assert second.is_alive(owner)
    del first
    gc.collect()
    assert not second.is_alive(owner)


@pytest.mark.parametrize("owner", ["0" * 16, "", "../escape", "0" * 17, "A" * 16, "0" * 15 + "\n", "/etc/passwd"])
def test_an_unknown_owner_is_dead(host, owner):
    assert not host.is_alive(owner)
    host.bury(owner)


def test_an_owner_s_name_leads_nowhere_else(host):
    lock = ExclusiveLock(host.directory / "elsewhere.lock")
    lock.acquire()
    assert not host.is_alive("../elsewhere")
    lock.release()
    host.bury("../elsewhere")
    assert lock.path.exists()


def test_the_dead_are_buried_and_the_living_are_not(host, start):
    process, other = start("print(host.owner(), flush=True)")
    file = host.directory / "processes" / f"{other}.lock"
    host.bury(other)
    host.bury(host.owner())
    assert file.exists()
    assert host.is_alive(host.owner())
    process.kill()
    process.wait()
    host.bury(other)
    assert not file.exists()
    host.bury(other)


def test_a_state_directory_that_became_read_only_is_refused(host, monkeypatch):
    (host.directory / "processes" / f"{'ab' * 8}.lock").touch()

    def unlink(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(ReadOnlyError, match="cannot be removed: Read-only file system"):
        host.owner()


def test_lock_files_of_the_dead_do_not_pile_up(host, start):
    for _ in range(3):
        process, _ = start("print(host.owner(), flush=True)")
        process.kill()
        process.wait()
    host.owner()
    assert len(os.listdir(host.directory / "processes")) == 1


# -- locks -------------------------------------------------------------------------------------------------------------


def test_one_at_a_time_is_in_a_locked_section(host, start):
    process, line = start("with host.locked('ram'):\n    print('in', flush=True)\n    sys.stdin.readline()")
    assert line == "in"
    entered = threading.Event()

    def enter():
        with host.locked("ram"):
            entered.set()

    with host.locked("other"):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.1)
    process.stdin.write("\n")
    process.stdin.flush()
    assert entered.wait(HANG_S)
    thread.join()


def test_a_killed_process_leaves_its_section_free(host, start):
    process, line = start(
        "with host.locked('ram'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        print('in', flush=True); sys.stdin.read(); os._exit(0)\n"
        "    sys.stdin.read()\n"
    )
    assert line == "in"
    process.send_signal(signal.SIGKILL)
    done = threading.Event()

    def enter():
        with host.locked("ram"):
            done.set()

    threading.Thread(target=enter, daemon=True).start()
    assert done.wait(HANG_S)


def test_a_child_that_leaves_its_parent_s_section_does_not_open_it(host):
    def leave():
        section.__exit__(None, None, None)
        return ExclusiveLock(host.directory / "ram.lock").acquire()

    section = host.locked("ram")
    section.__enter__()
    assert answer_of(leave) == "False"
    section.__exit__(None, None, None)
    assert answer_of(lambda: ExclusiveLock(host.directory / "ram.lock").acquire()) == "True"


def test_a_long_lock_has_one_holder(tmp_path):
    first, second = ExclusiveLock(tmp_path / "a.lock"), ExclusiveLock(tmp_path / "a.lock")
    assert first.acquire()
    assert not second.acquire()
    assert (first.held, second.held) == (True, False)
    first.release()
    first.release()
    assert second.acquire()
    second.release()
    assert first.acquire(blocking=True)


def test_a_released_lock_is_free_while_a_child_has_its_file(tmp_path):
    lock = ExclusiveLock(tmp_path / "a.lock")
    lock.acquire()
    inherited = os.dup(lock._fd)
    lock.release()
    assert ExclusiveLock(tmp_path / "a.lock").acquire()
    os.close(inherited)


def test_a_lock_lost_with_its_object_is_free(tmp_path):
    lock = ExclusiveLock(tmp_path / "a.lock")
    lock.acquire()
    del lock
    gc.collect()
    assert ExclusiveLock(tmp_path / "a.lock").acquire()


def test_a_child_neither_holds_nor_releases_its_parents_lock(tmp_path):
    lock = ExclusiveLock(tmp_path / "a.lock")
    lock.acquire()

    def child():
        held = lock.held
        lock.release()
        return f"{held} {ExclusiveLock(tmp_path / 'a.lock').acquire()}"

    assert answer_of(child) == "False False"
    assert lock.held
    assert not ExclusiveLock(tmp_path / "a.lock").acquire()


def test_a_lock_whose_file_was_replaced_is_taken_on_the_new_file(tmp_path):
    path = tmp_path / "a.lock"
    holder, waiter = ExclusiveLock(path), ExclusiveLock(path)
    holder.acquire()
    waiting = threading.Thread(target=waiter.acquire, kwargs={"blocking": True})
    waiting.start()
    time.sleep(0.05)
    path.unlink()
    holder.release()
    waiting.join()
    assert waiter.held
    assert not ExclusiveLock(path).acquire()


def test_a_lock_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be locked: Not a directory"):
        ExclusiveLock(tmp_path / "file" / "a.lock").acquire()


def test_a_removed_state_directory_is_named_in_the_error(host):
    lock = ExclusiveLock(host.store_directory("a") / "flusher.lock")
    shutil.rmtree(host.directory)
    host.directory.mkdir(mode=0o700)
    with pytest.raises(
        StoreError, match="was removed while in use, and changes pending in it are lost: restart"
    ) as caught:
        lock.acquire()
    assert caught.value.kind == "store"
    assert not caught.value.transient


def test_a_failed_listing_names_its_directory(host):
    ram_budget = RamBudget(host)
    looks = [
        (host.directory / "processes", host._bury_the_dead),
        (ram_budget.directory, ram_budget.files),
        (ram_budget.directory, ram_budget.paths),
        (ram_budget.directory.parent, lambda: unused_folders(ram_budget.directory)),
        (host.directory / "processes", lambda: host.is_alive("0" * 16)),
    ]
    for directory, look in looks:
        with no_descriptors_left(), pytest.raises(StoreError) as caught:
            look()
        assert str(directory) in str(caught.value)
        assert "Too many open files" in str(caught.value)
        assert "ulimit -n" in str(caught.value)
    assert entries_of(host.directory / "absent") == []


def test_lock_files_do_not_leak_descriptors(tmp_path):
    before = descriptors()
    holder = ExclusiveLock(tmp_path / "a.lock")
    holder.acquire()
    for _ in range(50):
        assert not ExclusiveLock(tmp_path / "a.lock").acquire()
    holder.release()
    assert descriptors() <= before


# -- directories -------------------------------------------------------------------------------------------------------


def test_files_of_a_host_are_private(host, directory):
    host.owner()
    with host.locked("ram"):
        pass
    for path in (directory, host.segments, host.store_directory("0123-abcd"), directory / "processes"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in [*directory.rglob("*.lock"), *host.segments.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_s_directory_is_its_own(host, directory):
    assert host.store_directory("0123-abcd") == directory / "stores" / "0123-abcd"


def test_a_relative_directory_is_made_absolute(tmp_path, shm, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Host(Path("state"), shm).directory == tmp_path / "state"


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_directory_open_to_others_is_refused(directory, shm, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ReadOnlyError, match=f"chmod 700 {directory}"):
        Host(directory, shm)


@AS_ROOT
def test_a_directory_of_somebody_else_is_refused(directory, shm):
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(ReadOnlyError, match="must belong to you"):
        Host(directory, shm)


def test_a_file_in_its_place_is_refused(directory, shm):
    directory.write_text("")
    with pytest.raises(StoreError, match="cannot be made: File exists"):
        Host(directory, shm)


def test_a_disk_without_room_for_it_is_an_error_that_says_what_to_do(directory, shm, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CapacityError, match=rf"{directory} cannot be made: No space.*: free some room"):
        Host(directory, shm)


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.sshfs", "lustre"])
def test_a_network_filesystem_is_refused_untouched(directory, shm, filesystem):
    mountinfo = f"1 1 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / {directory.parent} rw - {filesystem} server:/x rw\n"
    with pytest.raises(InvalidInputError, match=rf"network filesystem \({filesystem}\).*TIERFS_STATE_DIR"):
        Host(directory, shm, mountinfo=mountinfo)
    assert not directory.exists()


def test_a_link_to_a_private_directory_is_accepted(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make_private(tmp_path / "link")
    with pytest.raises(ReadOnlyError):
        make_private(tmp_path / "link", follow_links=False)


@pytest.mark.parametrize(
    ("given", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("~/b", None, "/home/me/b"),
        ("", "/x", "/x/tierfs"),
        (None, None, "/home/me/.local/state/tierfs"),
        (None, "~/x", "/home/me/x/tierfs"),
        (None, "relative", "/home/me/.local/state/tierfs"),
        (None, "./relative", "/home/me/.local/state/tierfs"),
    ],
)
def test_the_state_directory_is_named_by_the_environment(monkeypatch, given, xdg, expected):
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("TIERFS_STATE_DIR", given), ("XDG_STATE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert state_directory() == Path(expected)
    assert state_directory("~/given") == Path("/home/me/given")


@pytest.mark.parametrize("given", ["relative", "./relative", "~nobody-of-this-name/state"])
def test_a_relative_state_directory_is_refused_by_name(monkeypatch, given):
    with pytest.raises(InvalidInputError, match=f"{given}: .* an absolute path"):
        state_directory(given)
    monkeypatch.setenv("TIERFS_STATE_DIR", given)
    with pytest.raises(InvalidInputError, match=f"{given}: .* an absolute path"):
        state_directory()


# -- segments ----------------------------------------------------------------------------------------------------------


def test_processes_of_one_host_share_a_folder_in_shared_memory(host, start, shm):
    _, other = start("print(host.segments, flush=True)")
    assert other == str(host.segments)
    assert host.segments.parent == shm
    assert host.segments.name.startswith(f"tierfs-{os.geteuid()}-")


def test_shared_memory_lies_where_the_environment_says(directory, shm, monkeypatch):
    monkeypatch.setenv("TIERFS_SHM_DIR", str(shm))
    assert Host(directory).segments.parent == shm


def test_each_state_directory_has_a_folder_of_its_own(host, directory, tmp_path, shm):
    assert Host(tmp_path / "other", shm).segments != host.segments
    directory.rename(tmp_path / "moved")  # as in two containers, which each have a directory at one path
    assert Host(directory, shm).segments != host.segments
    assert Host(tmp_path / "moved", shm).segments == host.segments  # as if it were mounted at two paths


def test_a_copy_of_a_state_directory_has_a_folder_of_its_own(directory, shm, tmp_path):
    folder = Host(directory, shm).segments
    (folder / "01234567-0123456789abcdef-1.slab").touch()
    gc.collect()
    shutil.copytree(directory, tmp_path / "copy")
    assert Host(tmp_path / "copy", shm).segments != folder
    assert Host(directory, shm).segments == folder


def test_looking_for_a_folder_leaks_no_descriptors(host, directory, shm):
    before = descriptors()
    for _ in range(20):
        Host(directory, shm)
    gc.collect()
    assert descriptors() <= before


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def make_unusable(shm, name, how):
    match how:
        case "link":
            (shm / "elsewhere").mkdir(mode=0o700)
            (shm / name).symlink_to(shm / "elsewhere")
        case "open":
            (shm / name).mkdir()
            (shm / name).chmod(0o777)
        case "file":
            (shm / name).write_text("")
        case "foreign":
            (shm / name).mkdir(mode=0o700)
            os.chown(shm / name, 65534, 65534)


@pytest.mark.parametrize("how", ["link", "open", "file", pytest.param("foreign", marks=AS_ROOT)])
def test_a_folder_that_another_user_may_change_is_not_chosen(directory, shm, caplog, how):
    name = Host(directory, shm).segments.name
    gc.collect()
    (directory / "segments.txt").unlink()
    shutil.rmtree(shm / name)
    make_unusable(shm, name, how)
    other = Host(directory, shm)
    assert other.segments == other.fallback
    assert caplog.text.count("Shared memory is too small") == 1


@pytest.mark.parametrize("how", ["link", "open", "file", pytest.param("foreign", marks=AS_ROOT)])
def test_a_folder_in_use_that_another_user_may_change_is_an_error(host, directory, shm, how):
    name = host.segments.name
    shutil.rmtree(shm / name)
    make_unusable(shm, name, how)
    with pytest.raises(OSError, match=f"{name} (must belong to you and be closed to others|cannot be made)") as caught:
        Host(directory, shm)
    assert isinstance(caught.value, TierfsError)


@AS_ROOT
def test_another_users_unused_folder_blocks_no_process(directory, shm, tmp_path):
    name = Host(directory, shm).segments.name
    gc.collect()
    shutil.rmtree(shm / name)  # as systemd-logind does after a logout
    make_unusable(shm, name, "foreign")
    assert Host(directory, shm).segments == directory / "segments"


def test_without_shared_memory_segments_are_in_the_state_directory(directory, tmp_path, caplog):
    host = Host(directory, tmp_path / "missing")
    assert host.segments == host.fallback
    assert not (tmp_path / "missing").exists()
    assert "Shared memory is too small" in caplog.text
    assert host.is_alive(host.owner())


def test_all_processes_follow_the_folder_in_use(directory, shm, tmp_path, caplog):
    first = Host(directory, shm)
    (tmp_path / "elsewhere").mkdir()
    second = Host(directory, tmp_path / "elsewhere")
    assert second.segments == first.segments
    assert f"segments are not in {tmp_path}/elsewhere but in {first.segments}" in caplog.text
    assert Host(directory, tmp_path / "missing").segments == first.segments


def test_the_fallback_is_left_when_no_process_uses_it(directory, shm, tmp_path):
    first = Host(directory, tmp_path / "missing")
    second = Host(directory, shm)
    assert first.segments == second.segments == first.fallback
    del first, second
    gc.collect()
    assert Host(directory, shm).segments.parent == shm


def test_the_folder_is_in_use_while_a_forked_child_lives(directory, shm, tmp_path):
    host = Host(directory, shm)
    folder = host.segments
    with idle_child():
        del host
        gc.collect()
        (tmp_path / "elsewhere").mkdir()
        assert Host(directory, tmp_path / "elsewhere").segments == folder
        gc.collect()
    assert Host(directory, tmp_path / "elsewhere").segments != folder


@pytest.mark.parametrize("is_left", [False, True])
def test_a_folder_with_segments_stays_where_it_is(directory, shm, tmp_path, is_left):
    folder = Host(directory, shm).segments
    if is_left:
        (folder / "01234567-0123456789abcdef-1.slab").touch()
    gc.collect()
    (tmp_path / "elsewhere").mkdir()
    found = Host(directory, tmp_path / "elsewhere").segments
    assert (found == folder) == is_left
    assert is_left or found.parent == tmp_path / "elsewhere"


def test_a_process_that_cannot_see_the_folder_in_use_is_refused(directory, shm, tmp_path):
    host = Host(directory, shm)
    shm.rename(tmp_path / "hidden")  # as in a container with its own shared memory
    (tmp_path / "elsewhere").mkdir()
    for there in (shm, tmp_path / "elsewhere"):
        with pytest.raises(StoreError, match=f"{directory} is in use by processes .* in {host.segments}, which this"):
            Host(directory, there)
    assert Host(directory, tmp_path / "hidden").segments == tmp_path / "hidden" / host.segments.name
    del host
    gc.collect()
    assert Host(directory, tmp_path / "elsewhere").segments.parent == tmp_path / "elsewhere"


@pytest.mark.parametrize("change", ["boot", "device", "garbage", "empty"])
def test_an_outdated_text_file_is_replaced_while_no_process_uses_it(directory, shm, change):
    folder = Host(directory, shm).segments
    gc.collect()
    text = {
        "boot": f"{shm}/tierfs-{os.geteuid()}-{'f' * 16}\n{shm.stat().st_dev}\n",
        "device": f"{folder}\n1\n",
        "garbage": "\0\xff" * 100,
        "empty": "",
    }[change]
    (directory / "segments.txt").write_text(text, encoding="latin-1")
    assert Host(directory, shm).segments == folder
    assert (directory / "segments.txt").read_text() == f"{folder}\n{shm.stat().st_dev}\n"


def test_processes_that_come_at_once_have_one_folder(directory, shm, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    found = []
    threads = [
        threading.Thread(target=lambda place=place: found.append(Host(directory, place)))
        for place in [shm, tmp_path / "elsewhere"] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({host.segments for host in found}) == 1
    assert len(found) == 8


def test_a_full_disk_leaves_no_lock_on_the_text_file(directory, shm, monkeypatch):
    inherited = []

    def full_after_fork(*_):
        inherited.extend(os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if is_lock(fd))
        full()

    def is_lock(fd):
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(f"/proc/self/fd/{fd}") == str(directory / "segments.txt")

    with monkeypatch.context() as patch:
        patch.setattr("os.ftruncate", full_after_fork)
        before = descriptors()
        with pytest.raises(CapacityError, match=r"segments.txt cannot be used: No space.*: free some room"):
            Host(directory, shm)
    assert inherited
    assert Host(directory, shm).segments.parent == shm
    gc.collect()
    for fd in inherited:
        os.close(fd)
    assert descriptors() == before


def test_folders_that_no_process_uses_are_listed(host, directory, shm, tmp_path):
    other = Host(tmp_path / "other", shm)
    folder = other.segments
    (folder / "01234567-0123456789abcdef-1.slab").write_bytes(bytes(8192))
    assert unused_folders(host.segments) == []
    del other
    gc.collect()
    ((found, size, state),) = unused_folders(host.segments)
    assert (found, state) == (str(folder), str(tmp_path / "other"))
    assert size >= 8192


def test_a_new_folder_removes_unused_ones_without_segments(host, directory, shm, tmp_path):
    unused = [Host(tmp_path / name, shm).segments for name in ("empty", "full")]
    gc.collect()
    (unused[1] / "01234567-0123456789abcdef-1.slab").touch()
    assert Host(tmp_path / "new", shm).segments.exists()
    assert [folder.exists() for folder in (*unused, host.segments)] == [False, True, True]
    assert Host(tmp_path / "empty", shm).segments == unused[0]


@AS_ROOT
def test_folders_of_other_users_are_not_listed(host, shm, tmp_path):
    folder = Host(tmp_path / "other", shm).segments
    gc.collect()
    os.chown(folder, 65534, 65534)
    assert unused_folders(host.segments) == []


def test_a_relative_folder_for_segments_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_SHM_DIR", "shm")
    with pytest.raises(InvalidInputError, match="must be an absolute path"):
        Host(tmp_path / "state")


@pytest.fixture
def read_only(monkeypatch):
    """Return a function that lets nobody open a file below a directory for writing any more."""
    opened = os.open

    def make(directory):
        def refuse(name, flags, *mode):
            if flags & os.O_RDWR and directory in Path(name).parents:
                raise OSError(errno.EROFS, "Read-only file system")
            return opened(name, flags, *mode)

        monkeypatch.setattr("os.open", refuse)

    return make


def test_the_folder_is_found_after_its_disk_became_read_only(directory, shm, read_only):
    folder = Host(directory, shm).segments
    gc.collect()
    read_only(directory)
    assert Host(directory, shm).segments == folder


def test_a_lock_is_taken_where_its_disk_is_read_only_by_now(tmp_path, read_only):
    path = tmp_path / "a.lock"
    lock = ExclusiveLock(path)
    assert lock.acquire()
    lock.release()
    read_only(tmp_path)
    assert lock.acquire()
    assert not ExclusiveLock(path).acquire()
    lock.release()
