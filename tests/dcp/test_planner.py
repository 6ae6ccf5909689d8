"""`TierLoadPlanner`: values come back, and nothing that a checkpoint brings along is run."""

import collections
import os
import uuid

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from handmade import Handmade, pickled
from torch.distributed.checkpoint.api import CheckpointException

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.errors import InvalidInputError
from tierfs.store import open_store, parse_url

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Setting:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def save_object():
    url = f"memory://planner-{uuid.uuid4().hex}"
    tierfs.init(url)

    def save(value, content=None):
        made = Handmade(open_store(parse_url(url))[0], "run")
        made.object("setting", pickled(value) if content is None else content, "rank-00000-0badcafe.safetensors")
        made.save()
        return TierReader(f"tierfs::{url}/run")

    yield save
    fsspec.filesystem("memory").rm(url, recursive=True)


def load(reader, planner):
    loaded = {"setting": None}
    dcp.load(loaded, storage_reader=reader, planner=planner)
    return loaded["setting"]


def failure(reader, planner):
    with pytest.raises(CheckpointException) as caught:
        load(reader, planner)
    return caught.value.failures[0][0]


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        "text",
        None,
        b"bytes",
        b"",
        [1, (2, "x")],
        {"a": {1: 2}},
        {1, 2},
        collections.OrderedDict(a=1),
        torch.float16,
    ],
    ids=repr,
)
def test_plain_values_come_back(save_object, value, flatten):
    assert load(save_object(value), TierLoadPlanner(flatten, flatten)) == value


def test_what_is_not_allowed_is_named_with_the_way_to_allow_it(save_object):
    reader = save_object(Setting(5))
    error = failure(reader, TierLoadPlanner())
    assert isinstance(error, InvalidInputError)
    assert "'setting'" in str(error)
    assert "test_planner.Setting" in str(error)
    assert "allow=[test_planner.Setting]" in str(error)
    assert load(reader, TierLoadPlanner(allow=[Setting])) == Setting(5)
    assert isinstance(failure(reader, TierLoadPlanner()), InvalidInputError), "it was allowed for one planner"


def test_a_hostile_value_runs_nothing(save_object, tmp_path):
    touched = tmp_path / "touched"
    reader = save_object(Hostile(touched))
    error = failure(reader, TierLoadPlanner())
    assert "system" in str(error)
    assert not touched.exists()
    load(reader, dcp.DefaultLoadPlanner())
    assert touched.exists(), "the test would show nothing"


def test_what_is_no_pickle_of_torch_is_refused_by_name(save_object):
    for content in (b"", b"garbage", b"PK\x03\x04 garbage"):
        error = failure(save_object(None, content), TierLoadPlanner())
        assert isinstance(error, InvalidInputError)
        assert "'setting'" in str(error)


def test_it_takes_what_torchs_own_takes(save_object):
    planner = TierLoadPlanner(False, False, True)
    assert (planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.allow_partial_load) == (
        False,
        False,
        True,
    )
