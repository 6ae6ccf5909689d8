"""If ``.metadata`` cannot be read, a load raises the reader's first error and changes nothing."""

import json
import pickle
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fsspec
import torch.distributed.checkpoint as dcp
from support.handmade import Handmade
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, StoreError
from tierfs.store import load as read
from tierfs.store import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
FILE = "rank-00000-0badcafe.safetensors"
ROOT = "run/step_1/.metadata"


@pytest.fixture
def checkpoint(url):
    return f"tierfs::{url}/run/step_1"


@pytest.fixture
def document(store):
    made = Handmade(store, "run/step_1")
    made.tensor("w", torch.arange(6.0), FILE)
    made.save()
    return read(store, ROOT)


def cause_of(checkpoint, planner=None, reader=None):
    """Return the error that ends a load. It must be the first one, not the error of torch's fallback."""
    state = {"w": torch.full((6,), -1.0)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader or TierReader(checkpoint), planner=planner)
    assert torch.equal(state["w"], torch.full((6,), -1.0))
    (cause, _), *_ = raised.value.failures.values()
    assert "__0.metadata" not in str(cause), cause
    return cause


def nested(depth):
    return b'{"format":"tierfs-checkpoint","version":1,"x":' + b"[" * depth + b"]" * depth + b"}"


HOSTILE = {
    "nothing": b"",
    "zeros": bytes(4096),
    "text": b"hello",
    "half a pickle": pickle.dumps({"a": list(range(100))})[:40],
    "another pickle": pickle.dumps([1, 2, 3]),
    "a list": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "another document": json.dumps({"format": "else", "version": 1}).encode(),
    "no members": json.dumps({"format": "tierfs-checkpoint", "version": 1}).encode(),
    "deep": nested(200),
    "too deep": nested(100_000),
    "no text": b'{"format":"tierfs-checkpoint","\xff":1}',
    "random": random.Random(3).randbytes(2000),
}


@pytest.mark.parametrize("planner", [None, TierLoadPlanner])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_the_first_cause_ends_a_load(store, document, checkpoint, content, planner):
    save(store, ROOT, content)
    cause = cause_of(checkpoint, planner and planner())
    assert isinstance(cause, CorruptionError)
    assert ROOT in str(cause)


def test_a_document_cut_short_or_with_another_bit_is_damage(store, document, checkpoint):
    draw = random.Random(5)
    for _ in range(10):
        at = draw.randrange(len(document))
        for damaged in (
            document[:at],
            document[:at] + bytes([document[at] ^ 1 << draw.randrange(8)]) + document[at + 1 :],
        ):
            save(store, ROOT, damaged)
            assert isinstance(cause_of(checkpoint), (CorruptionError, FormatError))


def test_a_later_version_ends_a_load_as_that(store, document, checkpoint):
    save(store, ROOT, document.replace(b'"version":1', b'"version":9'))
    assert isinstance(cause_of(checkpoint), FormatError)


def test_a_directory_of_that_name_is_no_checkpoint(store, checkpoint):
    save(store, f"{ROOT}/file", b"x")
    cause = cause_of(checkpoint)
    assert isinstance(cause, CorruptionError)
    assert f"{ROOT} is a directory" in str(cause)


def test_an_outage_ends_a_load_as_that(store, document, checkpoint, monkeypatch):
    def fail(*_args, **_kwargs):
        raise StoreError("no route to host", transient=True)

    monkeypatch.setattr("tierfs.dcp.reader.read_checkpoint", fail)
    cause = cause_of(checkpoint)
    assert isinstance(cause, StoreError)
    assert "no route to host" in str(cause)


def test_a_load_of_a_missing_checkpoint_says_so(store, checkpoint):
    cause = cause_of(checkpoint)
    assert isinstance(cause, NotFoundError)
    assert "no checkpoint is at" in str(cause)


def test_damage_of_what_a_rank_saved_alone_is_the_cause(store, checkpoint):
    save(store, "run/step_1/__0.metadata", b"hello")
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"w": torch.zeros(6)}, storage_reader=TierReader(checkpoint))
    (cause, _), *_ = raised.value.failures.values()
    assert isinstance(cause, CorruptionError)
    assert "__0.metadata" in str(cause)


def test_a_reader_goes_on_after_a_failure(store, document, checkpoint):
    reader = TierReader(checkpoint)
    save(store, ROOT, b"hello")
    with pytest.raises(CorruptionError):
        reader.read_metadata()
    save(store, ROOT, document)
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"], torch.arange(6.0))


# -- torch's own readers -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(url, document):
    fs, root = fsspec.url_to_fs(f"tierfs::{url}")
    return fs, f"{root}/run/step_1"


ADVICE = r"(?s)tierfs' own format.*TierReader.*TIERFS_DCP=1"


def test_torchs_reader_ends_in_advice(checkpoint, document):
    with pytest.raises(InvalidInputError, match=ADVICE) as raised:
        FsspecReader(checkpoint).read_metadata()
    assert isinstance(raised.value.__cause__, pickle.UnpicklingError)
    with pytest.raises(CheckpointException) as loading:
        dcp.load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
    if str(loading.value.failures[0][0]) != "metadata is None":  # an older torch only logs the reason
        assert "TIERFS_DCP=1" in str(loading.value)


@pytest.mark.parametrize("name", [".metadata", FILE])
@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_load_of_a_file_of_ours_ends_in_advice(path, name, weights_only):
    fs, directory = path
    with pytest.raises(InvalidInputError, match=ADVICE), fs.open(f"{directory}/{name}", "rb") as file:
        torch.load(file, weights_only=weights_only)
    url = fs.unstrip_protocol(f"{directory}/{name}")
    with pytest.raises(InvalidInputError, match=ADVICE), fsspec.open(url, "rb") as file:
        torch.load(file, weights_only=weights_only)
    with pytest.raises(InvalidInputError, match=ADVICE), fs.open(f"{directory}/{name}", "rb") as file:
        pickle.load(file)


def test_other_errors_and_other_files_go_their_way(path):
    fs, directory = path
    with pytest.raises(ZeroDivisionError), fs.open(f"{directory}/.metadata", "rb") as file:
        assert 1 / len(file.read()[:0])
    fs.pipe_file(f"{directory}/note", b"{no pickle")
    with pytest.raises(pickle.UnpicklingError), fs.open(f"{directory}/note", "rb") as file:
        pickle.load(file)
    with fs.open(f"{directory}/.metadata", "rb") as file:
        with pytest.raises(pickle.UnpicklingError):
            pickle.load(file)
        file.seek(0)
        assert json.load(file)["version"] == 1
