"""Makes the kept stores of a version, with the code that is installed: ``make.py VERSION``.

Run it once, before the version is tagged. What it made never changes afterwards: each later version has to read it,
write on in it, collect its garbage, and verify it. `test_kept_stores.py` does that.

Contents are the same each time; ids and times are not. It needs /dev/fuse, the extras of `dev`, and accelerate.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from support.kept_stores import STEPS, Training, digest, files, state_of, tensors
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import tierfs
from tierfs.dcp import TierWriter
from tierfs.train import Manager, Replay

ARCHIVE_BYTES_MAX = 1_000_000
LEASE_S, GRACE_S = 1, 2
WAIT_S = 120.0


def run(*words: object) -> str:
    """Run a command of tierfs, and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "tierfs.cli", *map(str, words)], check=True, capture_output=True, text=True
    ).stdout


def until(check: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not check():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.1)


def content(name: str, length: int) -> bytes:
    return random.Random(name).randbytes(length)


def at(base: Path) -> str:
    return f"tierfs::file://{base}/store"


def make_files(base: Path) -> dict[str, Any]:
    """Files by fsspec and by a mount: short, long, text, appended, renamed, copied and deleted; and condemned chunks."""
    url = at(base)
    tierfs.init(f"file://{base}/store", digest="blake3", lease_s=LEASE_S, grace_s=GRACE_S)
    fs, root = fsspec.core.url_to_fs(url, ack="object")
    fs.pipe_file(f"{root}/old", content("old", 80_000))
    fs.pipe_file(f"{root}/later old", content("later old", 80_000))
    with fs.open(f"{root}/short", "wb", metadata={"step": 7}) as file:
        file.write(b"in its manifest")
    fs.pipe_file(f"{root}/empty", b"")
    fs.pipe_file(f"{root}/noise", content("noise", 100_000))
    fs.pipe_file(f"{root}/a/text", b"nothing new under the sun\n" * 100_000)
    with fs.open(f"{root}/a/text", "ab") as file:
        file.write(b"but this\n")
    fs.pipe_file(f"{root}/odd names/ü & 100%! [x].txt", b"odd")
    fs.pipe_file(f"{root}/moved from", content("moved", 70_000))
    fs.mv(f"{root}/moved from", f"{root}/a/moved")
    fs.cp_file(f"{root}/a/moved", f"{root}/a/copied")
    fs.makedirs(f"{root}/empty directory")
    (base / "mounted").mkdir()
    with tierfs.mount(url, str(base / "mounted")):
        (base / "mounted" / "by mount").mkdir()
        (base / "mounted" / "by mount" / "file").write_bytes(content("mount", 70_000))
        os.rename(base / "mounted" / "by mount" / "file", base / "mounted" / "by mount" / "renamed")
    run("wait", url)
    fs.rm_file(f"{root}/old")
    condemned = base / "store" / ".tierfs" / "gc"
    until(lambda: run("gc", url) and len(list(condemned.iterdir())) > 1)  # a list beside the collector's record
    fs.rm_file(f"{root}/later old")
    return {}


def make_checkpoints(base: Path) -> dict[str, Any]:
    """Checkpoints of `TierWriter`, one of torch's own writer, one of a plug, and a save over another one."""
    import accelerate

    from tierfs.plugs.accelerate import attach

    url = at(base)
    tierfs.init(f"file://{base}/store", lease_s=LEASE_S, grace_s=GRACE_S)
    for step in (1, 2, 3):
        dcp.save(state_of(step), storage_writer=TierWriter(f"{url}/run/step_{step}", ack="object"), no_dist=True)
    for step in (1, 4):
        dcp.save(state_of(step), storage_writer=TierWriter(f"{url}/replaced", ack="object"), no_dist=True)
    stock = FsspecWriter(f"{url}/stock")
    dcp.save(state_of(2), storage_writer=stock, no_dist=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Training().model
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.ones(64)).sum().backward()
    optimizer.step()
    with attach(accelerator, f"{url}/plug", ack="object"):
        accelerator.save_state(f"{url}/plug/step_12")
    run("wait", url)
    saved = ["run/step_1", "run/step_2", "run/step_3", "replaced", "stock", "plug/step_12"]
    return {"tensors": {path: tensors(f"{url}/{path}") for path in saved}}


def make_run(base: Path) -> dict[str, Any]:
    """A run of `Manager` with a log of its steps in the object tier."""
    url, training = at(base), Training()
    tierfs.init(f"file://{base}/store", lease_s=LEASE_S, grace_s=GRACE_S)
    replay = Replay(ring="8MiB", prove_every=1, level="object")
    with Manager(f"{url}/run", save=[replay], ack="object", nvme="0", ram="64MiB") as manager:
        for step in range(STEPS):
            training.step(step)
            manager.step(step, training.state, metrics={"loss": 1.0 / (step + 1)})
            manager.wait()
        run("wait", url)
        shutil.copytree(
            base / "store", base / "whole"
        )  # the end of a run that is not killed removes nothing of the log
    shutil.rmtree(base / "store")
    (base / "whole").rename(base / "store")
    return {"content": training.content()}


@contextlib.contextmanager
def flusher(url: str, state: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A flusher that sends nothing but small files to the object tier. It is killed at the end."""
    words = ["flusher", "run", url, "--state-dir", state, "--bandwidth", 1, "--linger", 600]
    words += ["--ram", "64MiB", "--nvme", "64MiB", "--peers", 1, "--peer-listen", f"127.0.0.1:{port}"]
    words += ["--peer-ram", "16MiB", "--peer-nvme", "16MiB"]
    with subprocess.Popen([sys.executable, "-m", "tierfs.cli", *map(str, words)]) as process:
        try:
            until(lambda: list(state.glob("stores/*/flusher.sock")))
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def make_host(base: Path) -> dict[str, Any]:
    """A host that was killed: a pending file, a pending checkpoint, a conflict, and peers."""
    url, states = at(base), [base / "state", base / "peer"]
    tierfs.init(f"file://{base}/store", lease_s=2, grace_s=4)
    tiers = {"ram": "64MiB", "nvme": "64MiB", "state_dir": str(states[0]), "bandwidth": 1, "peers": 1}
    tiers |= {"peer_listen": "127.0.0.1:47311", "peer_ram": "16MiB", "peer_nvme": "16MiB"}
    other, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True, ram="0", nvme="0", state_dir=str(base / "other"))
    for state in states:
        state.mkdir(mode=0o700)
    with flusher(url, states[0], 47311) as own, flusher(url, states[1], 47312):
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **tiers)
        until(lambda: fs.status(root)["peers"]["live"])
        own.send_signal(signal.SIGSTOP)
        fs.pipe_file(f"{root}/shared/contended", b"of this host", ack="staged")
        other.pipe_file(f"{root}/shared/contended", b"of the other host", ack="object")
        own.send_signal(signal.SIGCONT)
        until(lambda: fs.status(root)["conflict_files"])
        fs.pipe_file(f"{root}/done/published", b"small", ack="object")
        fs.pipe_file(f"{root}/waits/pending", content("pending", 200_000), ack="peer")
        dcp.save(state_of(1), storage_writer=TierWriter(f"{url}/run/step_1", **{**tiers, "ack": "local"}), no_dist=True)
        assert len(list((base / "store/.tierfs/peers").iterdir())) == len(states)
        pending = {"waits/pending": digest(fs.cat_file(f"{root}/waits/pending"))}
        found = {"pending": pending, "tensors": {"run/step_1": tensors(f"{url}/run/step_1", **tiers)}}
    [directory] = (states[0] / "stores").iterdir()
    for path in directory.iterdir():
        if path.name != "nvme":  # the rest names this place and these processes
            path.unlink() if not path.is_dir() else shutil.rmtree(path)
    return found


MAKERS = {"files": make_files, "checkpoints": make_checkpoints, "run": make_run, "host": make_host}


def pack(base: Path, target: Path) -> None:
    """Pack the store and what there is of its host, without names of users."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        is_private = "/.tierfs/tmp" in info.name or not (info.isfile() or info.isdir())
        return None if is_private else info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in ("store", "state/stores"):
            if (base / name).exists():
                archive.add(base / name, name, filter=plain)
    if target.stat().st_size > ARCHIVE_BYTES_MAX:
        raise ValueError(f"{target} has {target.stat().st_size} bytes: keep it below {ARCHIVE_BYTES_MAX}")


def make_in(base: Path, name: str) -> dict[str, Any]:
    """Make one store, in a process of its own, and return what a reader has to find."""
    os.environ.update(TIERFS_STATE_DIR=str(base / "own"), TIERFS_LOG="error")
    found = MAKERS[name](base)
    return {"files": files(at(base), ram="0", nvme="0", state_dir=str(base / "reader")), **found}


def main(version: str) -> None:
    target = HERE / version
    target.mkdir()
    expected = {}
    for name in MAKERS:
        with tempfile.TemporaryDirectory(prefix="kept-") as directory:
            words = [sys.executable, __file__, "--in", directory, name]
            made = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            expected[name] = json.loads(made.stdout.splitlines()[-1])  # libraries may print, too
            pack(Path(directory), target / f"{name}.tar.xz")
    (target / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--in":
        print(json.dumps(make_in(Path(sys.argv[2]), sys.argv[3])))
    else:
        main(sys.argv[1])
