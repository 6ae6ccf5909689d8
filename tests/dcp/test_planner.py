"""`TierLoadPlanner` loads values, and runs no code from a checkpoint."""

import collections
import importlib
import os
import re
import subprocess
import threading
import uuid

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import Handmade, pickled
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.errors import InvalidInputError
from tierfs.session import open_store, parse_url

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

    return save


class Trusting(dcp.DefaultLoadPlanner):
    """Unpickles anything, like torch's own planner. A caller that derives a planner asks for that."""


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


def test_a_refused_class_is_named_with_the_way_to_allow_it(save_object):
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
    for planner in (
        TierLoadPlanner(),
        None,
        dcp.DefaultLoadPlanner(),
        dcp.DefaultLoadPlanner(flatten_state_dict=False),
    ):
        assert "system" in str(failure(reader, planner))
        assert "allow=[" not in str(failure(reader, planner))
    assert not touched.exists()
    load(reader, Trusting())
    assert touched.exists(), "the test would show nothing"


@pytest.mark.parametrize(
    "call", [(eval, "1"), (subprocess.getoutput, "true"), (__import__, "os"), (importlib.import_module, "os")]
)
def test_no_advice_to_allow_a_call_that_runs_code(save_object, call):
    class Calls:
        def __reduce__(self):
            return call[0], call[1:]

    message = str(failure(save_object(Calls()), TierLoadPlanner()))
    assert call[0].__name__ in message
    assert "never allow" in message
    assert "allow=[" not in message


def test_a_hostile_value_runs_nothing_where_torch_hands_over_a_planner_of_its_own(save_object, tmp_path):
    reader = save_object(Hostile(tmp_path / "was run"))
    with pytest.raises(CheckpointException) as caught:
        _load_state_dict_from_keys(storage_reader=reader)
    assert "system" in str(caught.value.failures[0][0])
    assert not list(tmp_path.iterdir())
    assert _load_state_dict_from_keys(storage_reader=save_object([1, "two"])) == {"setting": [1, "two"]}


def test_an_object_that_is_no_pickle_of_torch_is_refused(save_object):
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


def test_classes_allowed_to_torch_are_allowed(save_object):
    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([Setting]):
        assert load(save_object(Setting(5)), TierLoadPlanner(allow=[Setting])) == Setting(5)
        assert Setting in torch.serialization.get_safe_globals()
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_many_threads_load_at_once(save_object, monkeypatch):
    reader, together = save_object(Setting(5)), threading.Barrier(2)
    load_one, failed = torch.load, []

    def slow(*args, **kwargs):
        try:
            together.wait(0.2)  # for another thread with the same permission; none comes
        except threading.BrokenBarrierError:
            together.reset()
        else:
            failed.append("two at once")
        return load_one(*args, **kwargs)

    def work():
        try:
            assert load(reader, TierLoadPlanner(allow=[Setting])) == Setting(5)
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr(torch, "load", slow)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_one_hint_names_all_that_a_numpy_array_needs(save_object):
    reader = save_object(np.arange(3, dtype=np.uint32))
    names = re.search(r"allow=\[([\w., ]+)\]", str(failure(reader, TierLoadPlanner())))[1].split(", ")
    allow = [
        getattr(importlib.import_module(module), name) for module, _, name in (full.rpartition(".") for full in names)
    ]
    assert load(reader, TierLoadPlanner(allow=allow)).tolist() == [0, 1, 2]


def test_all_of_numpy_can_be_allowed_together(save_object):
    allow = [
        *(value.__reduce__()[0] for value in (np.zeros(1), np.float64())),
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in np.typecodes["All"]},
    ]
    saved = {"state": np.random.RandomState(5).get_state(), "scalar": np.float32(2.5), "text": np.array(["a", "bc"])}
    loaded = load(save_object(saved), TierLoadPlanner(allow=allow))
    assert repr(loaded) == repr(saved)


def test_a_value_comes_back_under_a_key_that_is_no_text(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    url = f"tierfs::file://{tmp_path}/store/run"
    dcp.save(
        {"a": {0: {"n": 5}, None: "x", 2.5: [7], "b": [{3: 4}]}}, storage_writer=TierWriter(url, ram="0", nvme="0")
    )
    found = {"a": {0: {"n": 0}, None: "", 2.5: [], "b": [{3: 0}]}}
    dcp.load(found, storage_reader=TierReader(url, ram="0", nvme="0"), planner=TierLoadPlanner())
    assert found == {"a": {0: {"n": 5}, None: "x", 2.5: [7], "b": [{3: 4}]}}
