"""Values other than tensors: some load by default, and for others tierfs gives advice that works."""

import array
import collections
import copy
import copyreg
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import logging
import os
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import zipfile
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter, objects
from tierfs.dcp.objects import Unpickler, check_object
from tierfs.dcp.planner import unpickle_safely
from tierfs.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Point:
    x: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int = 1


class Colour(enum.Enum):
    RED = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Listed(list):
    """A user's list."""


class Mapped(dict):
    """A user's dict."""


class Outer:
    class Inner:
        def __eq__(self, other):
            return type(other) is type(self)

        __hash__ = None


def filled(kind, value):
    kind.append(value) if hasattr(kind, "append") else kind.update(value)
    return kind


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


BY_THEMSELVES = {
    "bytesio": io.BytesIO(b"abc"),
    "bytesio inside": {"a": [io.BytesIO(b"abc")]},
    "long integer": 2**4000,
    "long negative": -(2**4000),
    "just too long": 2**2040,
    "just short enough": 2**2039 - 1,
    "integers": [0, -1, 2**31, 2**63, 2**64],
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("abca"),
    "set": {1, 2},
    "complex": 1 + 2j,
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "random": random.Random(1).getstate(),
    "bytes": b"ab",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "bool": True,
    "none": None,
    "ellipsis": ...,
    "not implemented": (NotImplemented,),
    "long text": "x" * 100_000,
    "surrogate": "\ud800",
    "deep": nested(100),
    "float": float("inf"),
}
ALLOWED = {
    "namespace": types.SimpleNamespace(a=1),
    "deque": collections.deque([1, 2]),
    "deque with an end": collections.deque([1, 2], maxlen=2),
    "no deque": collections.deque(),
    "deque inside": {"a": [collections.deque([collections.deque([1])])]},
    "deque of long integers": collections.deque([2**4000]),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "defaultdict of ints": collections.defaultdict(int, a=1, b=2),
    "defaultdict without default": collections.defaultdict(None, a=1),
    "list of one's own": filled(Listed(), 1),
    "dict of one's own": filled(Mapped(), {"a": 1}),
    "namedtuple": Pair(1, [2]),
    "dataclass": Point(3),
    "slots": Slotted(3),
    "enum": Colour.RED,
    "flags": Flags.A | Flags.B,
    "inner class": Outer.Inner(),
    "datetime": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
    "timedelta": dt.timedelta(1),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "path": pathlib.PurePosixPath("a/b"),
    "frozenset": frozenset({1}),
    "range": range(3),
    "slice": slice(1, 2),
    "partial": functools.partial(int, base=2),
    "function": functools.reduce,
    "builtin": len,
    "class": dict,
    "uuid": uuid.UUID(int=5),
    "regex": re.compile("a"),
    "array": array.array("d", [1.0]),
    "scalar": np.float32(1.5),
    "numpy array": np.arange(3),
    "array of objects": np.array([1, "a"], dtype=object),
    "numpy state": np.random.RandomState(1).get_state(),
    "numpy generator": np.random.default_rng(0),
    "torch generator": torch.Generator(),
    "ordered of deques": collections.OrderedDict(a=collections.deque([1])),
}
BLOCKED = {"os": os.stat_result(range(10)), "os.environ": os.getcwd}
UNPICKLABLE = {
    "lambda": lambda: 0,
    "local class": type("Local", (), {})(),
    "memoryview": memoryview(b"ab"),
    "generator": (x for x in ()),
    "module": os,
    "memory format": torch.channels_last,
}


def equal(one, other):
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(equal, one.values(), other.values()))
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state == other.bit_generator.state
    if isinstance(one, functools.partial):
        return one.__reduce__()[1:] == other.__reduce__()[1:]
    return one == other


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(objects, "_warned", set())


def pickled(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def checked(value, caplog):
    """Return the warnings of a save about this value."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tierfs.dcp"):
        check_object("v", pickled(value).getbuffer())
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("value", BY_THEMSELVES.values(), ids=BY_THEMSELVES)
def test_objects_that_torch_allows_are_loaded(value, caplog):
    assert checked(value, caplog) == []
    found = unpickle_safely("'v'", pickled(value))
    assert type(found) is type(value)
    assert equal(value, found)


@pytest.mark.parametrize("value", ALLOWED.values(), ids=ALLOWED)
def test_the_advice_loads_a_value_when_it_is_followed(value, caplog):
    # The advice of the save and that of the load, each to the letter.
    [saving] = checked(value, caplog)
    assert checked(value, caplog) == []
    hint = "import {modules}, and load with planner=TierLoadPlanner(allow=[{name}])"
    with pytest.raises(InvalidInputError) as raised:
        unpickle_safely("'v'", pickled(value), hint=hint)
    for advice in (saving, str(raised.value)):
        space = {"TierLoadPlanner": TierLoadPlanner}
        modules, call = re.search(r"(import [\w., ]+), and .*planner=(TierLoadPlanner\([^)]*\))", advice).groups()
        exec(modules, space)
        planner = eval(call, space)
        found = unpickle_safely("'v'", pickled(value), allow=planner._allow)
        assert type(found) is type(value)
        assert equal(value, found)
    assert getattr(value, "maxlen", None) == getattr(found, "maxlen", None)
    assert getattr(value, "default_factory", None) == getattr(found, "default_factory", None)


def test_an_exception_loads_where_it_is_allowed(caplog, monkeypatch):
    # The module of KeyError has another name in a pickle. torch allows Python's exceptions by default from 2.14 on. If
    # tblib is installed, other tests make it pickle all exceptions of this process.
    monkeypatch.delitem(copyreg.dispatch_table, KeyError, raising=False)
    checked(KeyError("x"), caplog)
    found = unpickle_safely("'v'", pickled(KeyError("x")), allow=[KeyError])
    assert (type(found), found.args) == (KeyError, ("x",))


@pytest.mark.parametrize("value", BLOCKED.values(), ids=BLOCKED)
def test_an_object_that_could_never_load_is_not_saved(value):
    with pytest.raises(
        InvalidInputError, match=r"'v' could not be loaded again, so it is not saved: .*as plain values"
    ):
        check_object("v", pickled(value).getbuffer())


def test_another_protocol_is_not_saved():
    stream = io.BytesIO()
    torch.save(2**4000, stream, pickle_protocol=4)
    with pytest.raises(InvalidInputError, match="an instruction that cannot be loaded"):
        check_object("v", stream.getbuffer())


@pytest.mark.parametrize("value", UNPICKLABLE.values(), ids=UNPICKLABLE)
def test_an_unpicklable_object_keeps_the_earlier_checkpoint(url, value):
    where = f"tierfs::{url}/run"
    dcp.save({"v": 1}, storage_writer=TierWriter(where))
    with pytest.raises(CheckpointException):
        dcp.save({"v": value}, storage_writer=TierWriter(where))
    found = {"v": 0}
    dcp.load(found, storage_reader=TierReader(where))
    assert found == {"v": 1}


def test_a_save_warns_once_and_a_refused_one_loses_nothing(url, caplog):
    where = f"tierfs::{url}/run"
    state = {
        "queue": collections.deque([1, 2]),
        "buffer": io.BytesIO(b"x"),
        "steps": 2**4000,
        "counts": {"a": collections.deque()},
    }
    with caplog.at_level(logging.WARNING, "tierfs.dcp"):
        for _ in range(2):
            dcp.save(copy.deepcopy(state), storage_writer=TierWriter(where))
    said = [record.getMessage() for record in caplog.records if "allow=" in record.getMessage()]
    assert len(said) == 1
    assert "'queue' is built with collections.deque" in said[0]
    with pytest.raises(CheckpointException, match="could not be loaded again, so it is not saved"):
        dcp.save({**state, "queue": os.stat_result(range(10))}, storage_writer=TierWriter(where))
    for _ in range(2):
        found = {"queue": None, "buffer": None, "steps": 0, "counts": {"a": None}}
        planner = TierLoadPlanner(allow=[collections.deque])
        dcp.load(found, storage_reader=TierReader(where), planner=planner)
        assert found["queue"] == collections.deque([1, 2])
        assert (found["buffer"].getvalue(), found["steps"]) == (b"x", 2**4000)


@pytest.mark.parametrize("planner", [None, dcp.DefaultLoadPlanner, TierLoadPlanner])
def test_a_buffer_loads_whatever_the_planner(url, planner):
    where = f"tierfs::{url}/run"
    dcp.save({"v": io.BytesIO(b"abc")}, storage_writer=TierWriter(where))
    found = {"v": None}
    dcp.load(found, storage_reader=TierReader(where), planner=planner and planner())
    assert found["v"].getvalue() == b"abc"


# -- the loader --------------------------------------------------------------------------------------------------------


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


EVIL = {
    "a call": Runs(os.system, ("false",)),
    "a builtin": Runs(eval, ("1",)),
    "beside a deque": [collections.deque([1]), Runs(print, ("x",))],
    "beside a long integer": [2**4000, Runs(exec, ("1",))],
    "a state": [2**4000, Point(1)],
    "items": [2**4000, collections.deque([1])],
    "pairs": [2**4000, collections.defaultdict(int, a=1)],
}


@pytest.mark.parametrize("value", EVIL.values(), ids=EVIL)
def test_unpickling_runs_no_other_function(value):
    with pytest.raises(InvalidInputError, match="so it was not run"):
        unpickle_safely("'v'", pickled(value), hint="{name}")


def test_unpickled_objects_are_neither_called_nor_restored():
    raw = pickle.PROTO + b"\x02"
    for code in (
        b"]" + b"(tR.",  # calls a list
        b"(lK\x01a.",  # an opcode that the loader lacks
        b"\x8a\x01\x05}b.",  # sets the state of an integer
        b"X\x01\x00\x00\x00aK\x01a.",  # appends to a text
        b"X\x01\x00\x00\x00aK\x01K\x02s.",
        b"X\x01\x00\x00\x00a(K\x01e.",
        b"cos\nsystem\n(X\x05\x00\x00\x00false\x85R.",
        b"cposix\nsystem\n)R.",
        b"c__builtin__\neval\n)R.",
        b"\x8b\xff\xff\xff\x7fabc.",  # claims two GiB
    ):
        with pytest.raises(Exception) as raised:
            Unpickler(io.BytesIO(raw + code)).load()
        assert isinstance(raised.value, (pickle.UnpicklingError, KeyError, EOFError, IndexError)), code


def test_an_object_that_is_no_archive_is_not_checked():
    for content in (b"", b"PK\x03\x04", b"hello", pickle.dumps(len), b"PK\x03\x04" + bytes(100)):
        check_object("v", memoryview(content))


# -- pickles made by hand ------------------------------------------------------------------------------------------


def text(value):
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value):
    return b"J" + value.to_bytes(4, "little", signed=True)


def named(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def archive(body):
    """Return an archive as ``torch.save`` makes it.

    The first integer has an opcode that torch's own loader lacks, so tierfs' loader reads the archive.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("archive/data.pkl", b"\x80\x02" + b"\x8b\x01\0\0\0\x05" + body + b".")
        members.writestr("archive/version", "3\n")
        members.writestr("archive/byteorder", "little")
    file.seek(0)
    return file


def dtype(code):
    return named("numpy", "dtype") + b"(" + text(code) + b"\x89\x88tR"


def dtype_state(fields, size):
    names = text("a") + b"\x85"
    return b"(" + number(3) + text("|") + b"N" + names + fields + number(size) + number(1) + number(0) + b"t"


NUMPY = [np.dtype, np.ndarray, np.arange(1).__reduce__()[0]]
OBJECTS = dtype("O8") + b"(" + number(3) + text("|") + b"NNN" + number(-1) + number(-1) + number(63) + b"tb"


def test_a_load_refuses_to_allow_getattr():
    with pytest.raises(InvalidInputError, match="run any code"):
        TierLoadPlanner(allow=[getattr])


def test_getattr_finds_only_allowed_classes_inside_of_allowed_ones():
    inside = named("__builtin__", "getattr") + named("torch._utils", "_rebuild_tensor") + text("__globals__")
    with pytest.raises(InvalidInputError, match=r"does not allow by default|not an allowed global"):
        unpickle_safely("'v'", archive(inside + b"\x86R"), allow=[*objects.ALLOWED, torch.Tensor])


@pytest.mark.parametrize("offset", [0, 1 << 30])
def test_a_numpy_dtype_with_fields_is_not_restored(offset):
    fields = b"}" + text("a") + OBJECTS + number(offset) + b"\x86s"
    with pytest.raises(InvalidInputError, match="save plain arrays instead"):
        unpickle_safely("'v'", archive(dtype("V8") + dtype_state(fields, 8) + b"b"), allow=[*objects.ALLOWED, *NUMPY])


def test_an_array_is_not_made_at_an_address():
    made = named("numpy", "ndarray") + number(1) + b"\x85" + dtype("f8") + b"N" + b"\x87R"
    with pytest.raises(InvalidInputError, match="buffer and strides"):
        unpickle_safely("'v'", archive(made), allow=[*objects.ALLOWED, *NUMPY])


@pytest.mark.parametrize("method", ["extend", "append"])
def test_an_instance_brings_no_method_of_its_own(method):
    made = named("collections", "OrderedDict") + b")R}" + text(method) + named("collections", "Counter") + b"sb"
    with pytest.raises(InvalidInputError, match="Can only use what was allowed"):
        unpickle_safely("'v'", archive(made + b"(" + number(7) + b"e"))


def test_only_storages_are_persistent():
    made = b"(" + text("module") + named("collections", "Counter") + text("a.py") + text("source") + b"tQ"
    with pytest.raises(InvalidInputError, match="persistent_load of storage"):
        unpickle_safely("'v'", archive(made))


def test_a_name_in_a_pickle_is_looked_up_without_running_anything(monkeypatch):
    module = types.ModuleType("tierfs_test_lazy")
    module.__getattr__ = lambda name: pytest.fail("it was run")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(InvalidInputError, match=r"lazy\.anything"):
        unpickle_safely("'v'", archive(named(module.__name__, "anything")), allow=[*objects.ALLOWED, dict])


def test_an_archive_cut_off_behind_its_head_is_passed_over():
    check_object("v", memoryview(b"PK\x03\x04" + bytes(26) + b"\x80"))
