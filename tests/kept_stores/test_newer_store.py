"""A store with a feature that this version lacks is refused at every door, and nothing in it changes."""

import json
import shutil

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from support.independent_reader import ReaderError, StoreReader
from torch.distributed.checkpoint.api import CheckpointException

import tierfs
from tierfs.cli import main
from tierfs.dcp import TierReader, TierWriter
from tierfs.errors import FormatError
from tierfs.format.descriptor import Descriptor
from tierfs.session import parse_url
from tierfs.session.descriptor import probe_store
from tierfs.train import Manager, TrainState

COMMANDS = [
    "init {url}",
    "ls {url}",
    "stat {url}/a",
    "cat {url}/a",
    "cp {here} {url}/b",
    "cp {url}/a {here}",
    "mv {url}/a {url}/b",
    "rm {url}/a",
    "mount {url} {directory}",
    "materialize {url} {directory}",
    "sync {directory} {url}",
    "checkpoint ls {url}",
    "checkpoint import {directory} {url}/step_1",
    "prune {url} --keep latest:1",
    "status {url}",
    "wait {url}",
    "prefetch {url}",
    "evict {url}",
    "flusher run {url}",
    "du {url}",
    "verify {url}",
    "gc {url}",
    "gc {url} --exclusive",
    "scrub {url}",
    "repair {url}",
    "probe {url}",
]


def rewritten(path, **members):
    """Write a descriptor anew with other members and the checksum that follows from them."""
    document = {**json.loads(path.read_bytes()), **members}
    del document["checksum"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**document, "checksum": xxhash.xxh3_128_hexdigest(canonical)}))


@pytest.fixture
def place(tmp_path):
    """A directory store with the file ``a``, a copy that nothing has open."""
    tierfs.init(str(tmp_path / "made"))
    with fsspec.open(f"tierfs::file://{tmp_path}/made/a", "wb", ack="object") as file:
        file.write(b"old")
    return shutil.copytree(tmp_path / "made", tmp_path / "store")


def objects(place):
    return {path: path.read_bytes() for path in sorted((place / ".tierfs").rglob("*")) if path.is_file()}


@pytest.fixture
def newer(place):
    """The URL of a store with a feature that this version does not know."""
    rewritten(place / ".tierfs" / "store.json", features=["chunks-of-64-mib"])
    before = objects(place)
    yield f"tierfs::file://{place}"
    assert objects(place) == before


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_refuses_a_store_with_an_unknown_feature(line, newer, tmp_path, capsys):
    (tmp_path / "directory").mkdir()
    words = line.format(url=newer, here=tmp_path / "here", directory=tmp_path / "directory").split()
    (tmp_path / "here").write_bytes(b"new")
    assert main(words) == FormatError.exit_code
    said = capsys.readouterr().err
    assert "chunks-of-64-mib" in said
    assert "use a newer tierfs" in said
    assert (tmp_path / "here").read_bytes() == b"new"


def test_python_refuses_a_store_with_an_unknown_feature(newer, tmp_path):
    fs, root = fsspec.url_to_fs(newer)
    state = TrainState(model=torch.nn.Linear(2, 2), dataloader=None)
    doors = {
        "init": lambda: tierfs.init(newer),
        "open": lambda: fsspec.open(f"{newer}/a").open(),
        "write": lambda: fs.pipe_file(f"{root}/b", b"new"),
        "find": lambda: fs.find(root),
        "status": lambda: fs.status(root),
        "mount": lambda: tierfs.mount(newer, str(tmp_path / "mounted")),
        "save": lambda: dcp.save({"a": torch.ones(2)}, storage_writer=TierWriter(f"{newer}/s")),
        "load": lambda: dcp.load({"a": torch.ones(2)}, storage_reader=TierReader(f"{newer}/s")),
        "restore": lambda: Manager(newer, save=[]).restore(state),
    }
    for door, enter in doors.items():
        with pytest.raises((FormatError, CheckpointException), match="chunks-of-64-mib") as raised:
            enter()
        assert "use a newer tierfs" in str(raised.value), door


def test_the_independent_reader_refuses_an_unknown_feature(place, newer):
    with pytest.raises(ReaderError, match="chunks-of-64-mib") as raised:
        StoreReader(place)
    assert raised.value.kind == "format"


def test_a_probe_keeps_the_members_that_it_does_not_know(place):
    path = place / ".tierfs" / "store.json"
    document = json.loads(path.read_bytes())
    rewritten(path, later={"a": [1]}, endpoint={**document["endpoint"], "list_after_write": False})
    probe_store(parse_url(f"tierfs::file://{place}"))
    found = json.loads(path.read_bytes())
    assert (found["later"], found["endpoint"]) == ({"a": [1]}, document["endpoint"])
    assert Descriptor.decode(path.read_bytes(), "here").document["later"] == {"a": [1]}
