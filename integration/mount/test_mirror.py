"""A materialized directory serves programs like any directory, and shares bytes if its filesystem can."""

import os
import random
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from leftovers import end_flushers
from mounts import PROGRAM, run

from tierfs.cli.commands.materialize import materialize
from tierfs.cli.files.places import StorePlace
from tierfs.cli.terminal.progress import Progress
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.store import load, prefetch, save

pytestmark = pytest.mark.filterwarnings("default")

MIB = 1 << 20


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request):
    """Return a directory on a filesystem that can share bytes between files."""
    make = shutil.which(f"mkfs.{request.param}")
    if make is None or os.geteuid():
        pytest.skip(f"takes root and mkfs.{request.param} (apt-get install xfsprogs btrfs-progs)")
    with tempfile.TemporaryDirectory() as directory:
        image, path = Path(directory, "image"), Path(directory, "disk")
        path.mkdir()
        with open(image, "wb") as file:
            file.truncate(512 * MIB)
        run(make, "-q", image)
        done = subprocess.run(["mount", "-o", "loop", image, path], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{request.param} cannot be mounted here: {done.stderr.strip()}")
        try:
            yield path
        finally:
            end_flushers(path)
            run("umount", "--lazy", path)


def test_chunks_of_the_nvme_tier_take_no_room_a_second_time(disk, bucket):
    url, options = bucket
    tiers = TierOptions(ram="32MiB", nvme="160MiB", state_dir=str(disk / "state"), ack="object")
    store, path = open_store(replace(parse_url(f"tierfs::{url}/model"), options=options, tiers=tiers))
    content = os.urandom(48 * MIB + 77)
    for name in ("weights", "same"):
        save(store, f"{path}/{name}", content)
    prefetch(store, path, "nvme")
    os.sync()
    before = os.statvfs(disk).f_bfree
    done = materialize(StorePlace(url, store, path), str(disk / "out"), Progress("materialize"), deletes=False)
    os.sync()
    taken = (before - os.statvfs(disk).f_bfree) * os.statvfs(disk).f_frsize
    assert (disk / "out" / "weights").read_bytes() == (disk / "out" / "same").read_bytes() == content
    assert (done.files, done.read_bytes, done.shared_bytes) == (2, 0, 2 * len(content))
    assert taken < 16 * MIB
    # A write to one of them must not change the other.
    with open(disk / "out" / "weights", "r+b") as file:
        file.write(b"mine")
    assert (disk / "out" / "same").read_bytes() == content
    assert load(store, f"{path}/weights") == content
    end_flushers(disk)


def test_a_model_is_loaded_from_a_directory_that_was_materialized(local, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "saved")
    run(*PROGRAM, "sync", tmp_path / "saved", f"{local}/model")
    run(*PROGRAM, "materialize", f"{local}/model", tmp_path / "out")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_run_that_is_killed_goes_on(local, tmp_path):
    noise, source = random.Random(7), tmp_path / "source"
    source.mkdir()
    for number in range(6):
        (source / f"f{number}").write_bytes(noise.randbytes(20 * MIB))
    for words in (["sync", source, f"{local}/d"], ["materialize", f"{local}/d", tmp_path / "out"]):
        for delay_s in (0.3, 0.6):
            process = subprocess.Popen([*map(str, (*PROGRAM, *words))])
            time.sleep(delay_s)
            process.kill()
            process.wait()
            shown = list((tmp_path / "out").glob("f*"))
            assert all(path.read_bytes() == (source / path.name).read_bytes() for path in shown)
        run(*PROGRAM, *words)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"f{number}" for number in range(6)]
    assert all((tmp_path / "out" / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())
