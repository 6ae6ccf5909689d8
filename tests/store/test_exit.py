"""A process that ends finishes its running saves without deadlock, and reports the files that are still pending."""

import subprocess
import sys
import textwrap
import threading
import uuid

import fsspec
import pytest
from support.waiting import HANG_S

import tierfs
from tierfs.cli import main

BEGIN = """
import logging, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import tierfs

root, options = sys.argv[1], {"state_dir": sys.argv[1] + "-state", "ram": "128MiB", "ack": sys.argv[2]}
fs = tierfs.TierFileSystem(target_protocol="file", **options)
begun, content = threading.Event(), bytes(range(251)) * 200_000

def save():
    with fs.open(root + "/late", "wb") as file:
        file.write(b"begun")
        begun.set()
        time.sleep(0.5)
        file.write(content)
"""


def run(tmp_path, level, script):
    tierfs.init(f"file://{tmp_path}/store")
    (tmp_path / "script.py").write_text(f"{BEGIN}\n{textwrap.dedent(script)}")
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "store"), level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    # On a slow machine a message may say that files are not in the object tier yet.
    lines = [line for line in done.stderr.splitlines() if "files are not in" not in line]
    assert (done.returncode, lines) == (0, [])
    return done.stdout


def late(tmp_path):
    options = {"state_dir": f"{tmp_path}/store-state", "ram": "128MiB"}
    fs = tierfs.TierFileSystem(target_protocol="file", skip_instance_cache=True, **options)
    return fs.cat(f"{tmp_path}/store/late")


THREAD, EXECUTOR = "threading.Thread(target=save).start()", "ThreadPoolExecutor().submit(save)"


@pytest.mark.parametrize(("level", "start"), [("staged", THREAD), ("object", EXECUTOR)])
def test_a_threads_save_at_exit_is_kept(tmp_path, level, start):
    run(tmp_path, level, f"{start}\nbegun.wait()")
    assert late(tmp_path) == b"begun" + bytes(range(251)) * 200_000


@pytest.mark.parametrize(("method", "level"), [("spawn", "object"), ("fork", "staged")])
def test_a_childs_threads_save_at_exit_is_kept(tmp_path, method, level):
    script = f"""
    import multiprocessing

    def work():
        threading.Thread(target=save).start()
        begun.wait()

    if __name__ == "__main__":
        child = multiprocessing.get_context({method!r}).Process(target=work)
        child.start()
        child.join()
    """
    run(tmp_path, level, script)
    assert late(tmp_path) == b"begun" + bytes(range(251)) * 200_000
    if level == "object":  # the lease of the child ends with the child
        assert not list((tmp_path / "store" / ".tierfs" / "leases").iterdir())


def test_filesystem_calls_of_a_thread_outlive_the_main_thread(tmp_path):
    script = """
    def work():
        begun.set()
        time.sleep(0.5)
        fs.pipe(root + "/a", content)
        assert fs.cat(root + "/a") == content
        fs.mv(root + "/a", root + "/late")

    threading.Thread(target=work).start()
    begun.wait()
    """
    run(tmp_path, "staged", script)
    assert late(tmp_path) == bytes(range(251)) * 200_000


@pytest.mark.parametrize("level", ["staged", "object"])
def test_an_exit_handler_registered_first_can_write(tmp_path, level):
    run(
        tmp_path,
        level,
        """
        import atexit

        atexit.register(save)
        fs.pipe(root + "/early", content)
        """,
    )
    assert late(tmp_path) == b"begun" + bytes(range(251)) * 200_000


def test_a_suspended_writer_is_discarded_at_exit(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    script = """
    def write():
        with fs.open(root + "/half", "wb") as file:
            file.write(content)
            yield
            file.write(content)

    suspended = write()
    next(suspended)
    """
    (tmp_path / "script.py").write_text(f"{BEGIN}\n{textwrap.dedent(script)}")
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "store"), "staged"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert "is not published" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_thread_that_waits_for_the_main_one_delays_no_exit(tmp_path):
    script = """
    def watch():
        threading.main_thread().join()
        print("seen")

    threading.Thread(target=watch).start()
    fs.pipe(root + "/a", b"a")
    """
    assert run(tmp_path, "staged", script) == "seen\n"


def test_a_child_process_waits_for_its_files_or_names_them(tmp_path):
    script = """
    import multiprocessing

    def write():
        logging.getLogger("tierfs.store").addHandler(logging.StreamHandler(sys.stdout))
        fs.pipe(root + "/a", bytes(1000))

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=write)
        child.start()
        child.join()
        print("level", fs.ack(root + "/a"))
    """
    told = run(tmp_path, "staged", script)
    assert "level object" in told or "files are not in" in told


def test_a_change_outlives_a_flusher_whose_thread_cannot_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "tierfs-flusher":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    url = f"memory://{uuid.uuid4().hex}"
    tierfs.init(url)
    fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack="staged", ram="64MiB", nvme="0")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        fs.pipe_file(f"{root}/a", b"first")
        assert fs.cat(f"{root}/a") == b"first"
    assert "no thread can be started to flush it" in caplog.text
    fs.pipe_file(f"{root}/b", b"second")
    fs.wait(root, "object")


def test_a_lease_ends_with_the_process_that_took_it(tmp_path):
    script = """
    import os
    save()
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
    print(len(os.listdir(root + "/.tierfs/leases")))
    """
    assert run(tmp_path, "object", script) == "1\n", "the child leaves it"
    assert not list((tmp_path / "store" / ".tierfs" / "leases").iterdir())


def test_the_lease_of_a_forked_child_ends_with_the_child(tmp_path):
    script = """
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=save)
    child.start()
    child.join()
    """
    run(tmp_path, "object", script)
    assert not list((tmp_path / "store" / ".tierfs" / "leases").iterdir())


def test_the_lease_of_a_flusher_ends_with_the_flusher(tmp_path):
    run(tmp_path, "staged", "save()\nfs.wait(root + '/late', 'object')")
    leases = tmp_path / "store" / ".tierfs" / "leases"
    assert len(list(leases.iterdir())) == 1
    assert main(["flusher", "stop", f"{tmp_path}/store", "--state-dir", f"{tmp_path}/store-state"]) == 0
    assert not list(leases.iterdir())
