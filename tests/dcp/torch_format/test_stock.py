"""`TierReader` loads the tensors of checkpoints that torch's own writers made, and runs none of their pickles' code."""

import contextlib
import io
import json
import os
import pathlib
import pickle
import resource
import sys
import tracemalloc
import types
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.forked import in_child
from support.handmade import BoxPlanner
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES, bytes_of
from tierfs.dcp.torch_format import data as stockdata
from tierfs.dcp.torch_format.metadata import StockPlace, decode_pickle
from tierfs.errors import CorruptionError, InvalidInputError
from tierfs.store import load, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(os, "sync", lambda: None)
    url = f"memory://stock-{uuid.uuid4().hex}"
    tierfs.init(url)
    return f"tierfs::{url}"


def state():
    generator = torch.manual_seed(3)
    return {
        "model": {
            "w": torch.randn(40, 30, generator=generator),
            "half": torch.randn(9, generator=generator).bfloat16(),
            "layers": [torch.arange(5), torch.tensor(2.5)],
        },
        "step": 12,
        "names": ["a", "b"],
    }


def cleared(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: cleared(item) for key, item in value.items()}
    return [cleared(item) for item in value] if isinstance(value, list) else type(value)()


def flat(value):
    return dcp._nested_dict.flatten_state_dict(value)[0]


def assert_loads(url, saved):
    loaded = cleared(saved)
    dcp.load(loaded, storage_reader=TierReader(url), planner=TierLoadPlanner())
    for name, value in flat(saved).items():
        found = flat(loaded)[name]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name


def test_a_stock_checkpoint_saved_by_url_is_read(url):
    dcp.save(state(), checkpoint_id=f"{url}/run")
    assert_loads(f"{url}/run", state())


def test_a_checkpoint_of_many_files_is_read(url):
    dcp.save(state(), storage_writer=FsspecWriter(f"{url}/run", single_file_per_rank=False))
    assert_loads(f"{url}/run", state())


def test_a_checkpoint_older_than_its_store_is_read(tmp_path):
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "store" / "run"))
    tierfs.init(f"file://{tmp_path}/store")
    assert_loads(tmp_path / "store" / "run", state())
    assert_loads(f"tierfs::file://{tmp_path}/store/run", state())


def test_checkpoints_saved_without_collectives_are_read(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    directory = tmp_path / "store" / "run"
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(directory))
    (directory / ".metadata").rename(directory / "__0.metadata")
    assert_loads(directory, state())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_part_of_a_tensor_is_read_into_any_destination(url, monkeypatch, streamed):
    if streamed:
        monkeypatch.setattr(stockdata, "STREAMED_BYTES_MIN", 1)
    tensor = state()["model"]["w"]
    dcp.save({"w": tensor}, checkpoint_id=f"{url}/run")
    wanted = {
        ("w", (10, 5)): torch.zeros(7, 20, dtype=torch.float64),
        ("w", (0, 0)): torch.zeros(30, 40).t(),
        ("w", (39, 29)): torch.zeros(1, 1),
    }
    reader, planner = TierReader(f"{url}/run"), BoxPlanner(wanted)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.plan(metadata), planner)
    for (_, (top, left)), part in wanted.items():
        expected = tensor[top : top + part.shape[0], left : left + part.shape[1]]
        assert torch.equal(part, expected.to(part.dtype))
    assert planner.committed == ["w"] * 3


def test_a_large_checkpoint_is_read_in_batches(url, monkeypatch):
    monkeypatch.setattr(stockdata, "BATCH_BYTES_MAX", 3000)
    saved = {f"t{number}": torch.randn(number) for number in range(1, 30)}
    dcp.save(saved, checkpoint_id=f"{url}/run")
    assert_loads(f"{url}/run", saved)


def write_safetensors(tensors, metadata=None):
    """Return the bytes that ``safetensors.torch.save`` returns, without needing the package."""
    table, content = {"__metadata__": metadata or {}}, b""
    for name, tensor in tensors.items():
        raw = bytes(bytes_of(tensor))
        place = [len(content), len(content) + len(raw)]
        table[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        content += raw
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + content


@pytest.fixture
def safetensors(monkeypatch):
    module = types.ModuleType("safetensors.torch")
    module.save = write_safetensors
    monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)


def test_a_checkpoint_of_safetensors_is_read(url, safetensors):
    writer = FsspecWriter(f"{url}/run", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state(), storage_writer=writer)
    assert_loads(f"{url}/run", state())


def test_a_table_of_tensors_that_does_not_fit_is_damage(url, safetensors, store):
    writer = FsspecWriter(f"{url}/run", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer)
    content = load(store, "run/__0_0.distcp")
    for old, new in [
        (b'"F32"', b'"I32"'),
        (b'"shape": [6]', b'"shape": [5]'),
        (b'"w"', b'"v"'),
        (b"{", b"?"),
        (b"24]", b"20]"),
    ]:
        assert old in content
        save(store, "run/__0_0.distcp", content.replace(old, new))
        with pytest.raises(CheckpointException, match=r"__0_0\.distcp"):
            dcp.load({"w": torch.zeros(6)}, storage_reader=TierReader(f"{url}/run"))


def test_notes_on_shards_that_are_nested_deeply_are_damage(url, safetensors, store):
    writer = FsspecWriter(f"{url}/run", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer)
    file = write_safetensors({"w": torch.arange(6.0)}, {"DCP_SHARDING_INFO": "[" * 5000})
    save(store, "run/__0_0.distcp", file)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"w": torch.zeros(6)}, storage_reader=TierReader(f"{url}/run"))
    ((cause, _),) = failed.value.failures.values()
    assert isinstance(cause, CorruptionError), cause


def test_damage_in_an_archive_names_tensor_and_file(url, store):
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=f"{url}/run")
    content = bytearray(load(store, "run/__0_0.distcp"))
    content[len(content) // 4 :] = bytes(len(content) - len(content) // 4)
    save(store, "run/__0_0.distcp", content)
    with pytest.raises(CheckpointException, match=r"'w' in shard file .*__0_0\.distcp is not a tensor"):
        dcp.load({"w": torch.zeros(6)}, storage_reader=TierReader(f"{url}/run"))


@pytest.mark.parametrize("how", ["in memory", "as a stream"])
@pytest.mark.parametrize("what", ["tensor", "strided", "object"])
def test_a_flipped_bit_in_what_others_wrote_is_not_loaded(tmp_path, monkeypatch, what, how):
    if how == "as a stream":
        monkeypatch.setattr(stockdata, "STREAMED_BYTES_MIN", 1000)
    tierfs.init(f"file://{tmp_path}/store")
    saved = {
        "tensor": torch.arange(1000.0),
        "strided": torch.arange(5000.0, 5900.0).view(30, 30).t(),
        "object": "abcdefgh" * 200,
    }
    dcp.save(saved, checkpoint_id=tmp_path / "store" / "run")
    found = {"tensor": torch.zeros(1000), "strided": torch.zeros(30, 30), "object": ""}
    dcp.load(found, storage_reader=TierReader(f"tierfs::file://{tmp_path}/store/run"))
    assert all(torch.equal(found[name], saved[name]) for name in ("tensor", "strided"))
    assert found["object"] == saved["object"]
    file = tmp_path / "store" / "run" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    raw = saved[what].encode() if what == "object" else saved[what].t().contiguous().numpy().tobytes()
    content[content.index(raw) + len(raw) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match=rf"'{what}' in shard file .*__0_0\.distcp: damaged"):
        dcp.load(found, storage_reader=TierReader(f"tierfs::file://{tmp_path}/store/run"))


@pytest.mark.parametrize("name", ["step", "model.w"])
@pytest.mark.parametrize("length", [30_000_000, 1 << 62])
def test_sizes_in_metadata_allocate_nothing(url, store, name, length):
    found = pickle.loads(stock_metadata(url, store))
    for index, info in found.storage_data.items():
        if index.fqn == name:
            found.storage_data[index] = _StorageInfo(info.relative_path, info.offset, length)
    save(store, "run/.metadata", pickle.dumps(found))
    loaded = cleared(state())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointException) as failed:
            dcp.load(loaded, storage_reader=TierReader(f"{url}/run"), planner=TierLoadPlanner())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ((cause, _),) = failed.value.failures.values()
    assert isinstance(cause, CorruptionError), cause
    assert name in str(cause)
    assert "__0_0.distcp" in str(cause)
    assert peak < 20 << 20


# -- the pickle ------------------------------------------------------------------------------------------------------


def stock_metadata(url, store):
    dcp.save(state(), checkpoint_id=f"{url}/run")
    return load(store, "run/.metadata")


def test_the_pickle_gives_what_torch_makes_of_it(url, store):
    data = stock_metadata(url, store)
    found, expected = decode_pickle(data, "x"), pickle.loads(data)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.version == expected.version
    assert found.storage_meta == expected.storage_meta
    assert {index: (place.file, place.at, place.length) for index, place in found.storage_data.items()} == {
        index: (info.relative_path, info.offset, info.length) for index, info in expected.storage_data.items()
    }
    assert {type(place) for place in found.storage_data.values()} == {BytesPlace, StockPlace}


class _Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_hostile_pickle_runs_nothing(url, store, tmp_path, protocol):
    touched = tmp_path / "touched"
    data = pickle.dumps(_Runs(os.system, f"touch {touched}"), protocol)
    pickle.loads(data)
    assert touched.exists(), "the test would show nothing"
    touched.unlink()
    save(store, "run/.metadata", data)
    with pytest.raises(InvalidInputError, match=r"run/\.metadata.*(posix|os)\.system"):
        TierReader(f"{url}/run").read_metadata()
    with pytest.raises(CheckpointException):  # an older torch hides the reason
        dcp.load({"w": torch.zeros(6)}, storage_reader=TierReader(f"{url}/run"))
    assert not touched.exists()


@pytest.mark.parametrize(
    "function", [eval, getattr, setattr, open, __import__, pickle.loads, torch.load, torch.hub.load]
)
def test_no_function_is_called_whatever_its_name(function):
    with pytest.raises(InvalidInputError, match=function.__name__):
        decode_pickle(pickle.dumps(_Runs(function, "x", "y")), "x")


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_metadata_pickled_by_the_first_pythons_3_11_can_be_read(monkeypatch, protocol, memory_format):
    # They pickle the member of an enumeration as ``getattr`` of its name. Debian 12 has one of these versions.
    by_name = lambda member, _protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    properties = TensorProperties(memory_format=memory_format)
    tensor = TensorStorageMetadata(
        properties, torch.Size([1]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]
    )
    data = pickle.dumps(Metadata({"w": tensor}, storage_data={}), protocol)
    assert b"getattr" in data
    assert decode_pickle(data, "x").state_dict_metadata["w"].properties.memory_format is memory_format


def test_getattr_of_anything_else_is_refused():
    for arguments in [(_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (torch.float32, "itemsize")]:
        with pytest.raises(InvalidInputError, match="getattr"):
            decode_pickle(pickle.dumps(_Runs(getattr, *arguments)), "x")


def test_names_inside_of_allowed_modules_are_refused_too():
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "torch"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("pathlib", "os.system"),
    ]:
        data = (
            b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93)R."
        )
        with pytest.raises(InvalidInputError, match=name):
            decode_pickle(data, "x")


def test_a_pickle_cannot_change_the_classes_it_names():
    # The opcode BUILD on a class sets its attributes: here ``__hash__`` of one of torch's classes.
    names = (b"torch.distributed.checkpoint.metadata", b"MetadataIndex")
    push = b"".join(b"\x8c" + bytes([len(text)]) + text for text in names) + b"\x93"
    data = b"\x80\x04" + push + b"N}\x8c\x08__hash__K\x01s\x86b."
    before = MetadataIndex.__hash__
    with pytest.raises(CorruptionError):
        decode_pickle(data, "x")
    assert MetadataIndex.__hash__ is before
    names = (b"torch", b"Size")
    push = b"".join(b"\x8c" + bytes([len(text)]) + text for text in names) + b"\x93"
    with pytest.raises(CorruptionError):
        decode_pickle(b"\x80\x04" + push + b"N}\x8c\x08__hash__K\x01s\x86b.", "x")


def test_a_pickle_takes_no_memory_on_its_word():
    for data in (
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo entry with the number 2^31 - 1
        b"\x80\x05\x96" + b"\xff" * 5 + b"\0\0\0.",  # claims a bytearray of a terabyte
        b"\x80\x04\x8d" + b"\xff" * 5 + b"\0\0\0.",  # claims a text of a terabyte
    ):
        with pytest.raises(CorruptionError):
            decode_pickle(data, "x")


def metadata_pickle(table, start=b"", rest=b""):
    """Return a pickle of torch's `Metadata` whose ``state_dict_metadata`` these opcodes make."""
    module = b"ctorch.distributed.checkpoint.metadata\n"
    return b"\x80\x02" + start + module + b"Metadata\n)\x81}(X\x13\0\0\0state_dict_metadata" + table + rest + b"ub."


HASH = b"ctorch.serialization\n_get_layout\n"
DOUBLED = b")" + b"q\x00h\x00\x86" * 100
"""A tuple holds an empty tuple twice, the next one holds that twice, and so on: 2^100 if each reference is followed."""
NESTED = b")" + b"\x85" * 300_000
ENDLESS = {
    "nested layout": b"\x80\x02" + HASH + NESTED + b"\x85R.",
    "nested key": b"\x80\x02}" + NESTED + b"K\x01s.",
    "doubled layout": b"\x80\x02" + HASH + DOUBLED + b"\x85R.",
    "doubled key": b"\x80\x02}" + DOUBLED + b"K\x01s.",
    "doubled keys": b"\x80\x02}(K\x01K\x01" + DOUBLED + b"K\x01u.",
}


def test_a_pickle_that_is_endless_to_hash_is_damage():
    def decode_all():
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        for data in ENDLESS.values():
            with pytest.raises(CorruptionError):
                decode_pickle(data, "WHERE")

    # In a child, since these pickles would end the process, or hang in C.
    assert in_child(decode_all) == 0


def test_a_path_is_not_longer_than_its_pickle():
    paths = b"cpathlib\nPosixPath\nq\x00X\x01\0\0\0aq\x01" + b"h\x00h\x01h\x01\x86Rq\x01" * 20
    with pytest.raises(CorruptionError, match="longer"):
        decode_pickle(b"\x80\x02" + paths + b".", "x")


def test_a_deep_structure_is_damage_wherever_it_is():
    for deep in (NESTED, DOUBLED, b"]" * 100_000 + b"a" * 99_999):
        with pytest.raises(CorruptionError, match="WHERE"):
            decode_pickle(metadata_pickle(deep), "WHERE")
        assert (
            decode_pickle(
                metadata_pickle(
                    b"}", rest=b"X\x0c\0\0\0planner_data}X\x01\0\0\0a" + deep + b"sX\x0c\0\0\0storage_data}"
                ),
                "x",
            ).planner_data
            is None
        )


def test_a_planners_own_keys_are_passed_over(url, store):
    found = pickle.loads(stock_metadata(url, store))
    found.planner_data = {("a", 1): 1, 1.5: 2, None: 3, True: 4, -7: 5}
    assert decode_pickle(pickle.dumps(found), "x").planner_data is None


def test_integers_that_all_hash_to_the_same_are_no_keys():
    found = Metadata({}, {number * sys.hash_info.modulus: 1 for number in range(10)}, {})
    with pytest.raises(CorruptionError, match="key"):
        decode_pickle(pickle.dumps(found), "x")


def test_a_pickle_that_names_one_list_many_times_takes_no_more_memory_than_it_is_long():
    chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))] * 1000
    items = {str(number): TensorStorageMetadata(TensorProperties(), torch.Size((3,)), chunks) for number in range(1000)}
    with pytest.raises(CorruptionError, match="more often"):
        decode_pickle(pickle.dumps(Metadata(items, None, {})), "x")
    path = ("a",) * 200
    found = Metadata({}, {str(number): path for number in range(1000)}, {})
    with pytest.raises(CorruptionError, match="more often"):
        decode_pickle(pickle.dumps(found), "x")


def test_a_size_is_no_copy_of_a_list():
    kept = b"](" + b"N" * 5000 + b"eq\x01ctorch\nSize\nq\x00"
    data = metadata_pickle(b"](" + b"h\x00h\x01\x85R" * 5000 + b"e", kept)
    tracemalloc.start()
    with pytest.raises(CorruptionError):
        decode_pickle(data, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_metadata_of_many_small_shards_is_read():
    # Their pickles are as short as possible: shards without dimensions, or chunks of one row.
    scalar = TensorProperties()
    items = {
        str(number): TensorStorageMetadata(
            scalar, torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
        )
        for number in range(500)
    }
    rows = [ChunkStorageMetadata(torch.Size((row, 0, 0)), torch.Size((1, 1, 1))) for row in range(500)]
    items["rows"] = TensorStorageMetadata(scalar, torch.Size((500, 1, 1)), rows)
    places = {
        MetadataIndex(fqn, chunk.offsets): _StorageInfo("x", 0, 1) for fqn in items for chunk in items[fqn].chunks
    }
    found = decode_pickle(pickle.dumps(Metadata(items, {fqn: (fqn,) for fqn in items}, places)), "x")
    assert found.state_dict_metadata == items
    assert list(found.storage_data) == list(places)


def test_a_path_is_read_as_text(url, store):
    found = pickle.loads(stock_metadata(url, store))
    found.storage_meta.checkpoint_id = pathlib.Path("/some") / "place" / "x"
    assert decode_pickle(pickle.dumps(found), "x").storage_meta.checkpoint_id == "/some/place/x"


@settings(deadline=None)
@given(st.data())
def test_a_damaged_pickle_gives_damage_or_metadata(data):
    stream = io.BytesIO()
    places = {
        MetadataIndex("a", (0,)): _StorageInfo("__0_0.distcp", 0, 10),
        MetadataIndex("b"): _StorageInfo("x", 0, 9),
    }
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))
    items = {"a": TensorStorageMetadata(TensorProperties(), torch.Size((3,)), [chunk]), "b": BytesStorageMetadata()}
    pickle.dump(Metadata(items, {"a": ("a", 0)}, places), stream)
    damaged = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(CorruptionError, InvalidInputError):
        decode_pickle(bytes(damaged), "WHERE")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: setattr(found, "state_dict_metadata", None),
        lambda found: setattr(found, "storage_data", {1: 2}),
        lambda found: found.storage_data.update({MetadataIndex("step"): _StorageInfo("../../etc/passwd", 0, 10)}),
        lambda found: found.storage_data.update({MetadataIndex("step"): _StorageInfo("x", -1, 10)}),
        lambda found: found.storage_data.update({MetadataIndex("step"): _StorageInfo("x", 0, "10")}),
        lambda found: found.state_dict_metadata.update({"step": 5}),
        lambda found: found.state_dict_metadata.update({5: found.state_dict_metadata["step"]}),
        lambda found: found.state_dict_metadata.update(
            {
                "w": TensorStorageMetadata(
                    TensorProperties(), torch.Size((1,)), found.state_dict_metadata["model.w"].chunks
                )
            }
        ),
        lambda found: setattr(found.state_dict_metadata["model.w"].properties, "dtype", 7),
        lambda found: setattr(found.state_dict_metadata["model.w"], "size", [40, 30]),
    ],
)
def test_metadata_that_cannot_be_is_damage(url, store, change):
    found = pickle.loads(stock_metadata(url, store))
    change(found)
    with pytest.raises(CorruptionError, match="WHERE"):
        decode_pickle(pickle.dumps(found), "WHERE")


def test_a_pickle_of_something_else_is_damage():
    for value in (5, [], {}, torch.Size((1,)), MetadataIndex("a")):
        with pytest.raises(CorruptionError, match="WHERE"):
            decode_pickle(pickle.dumps(value), "WHERE")


def test_a_planners_own_data_is_passed_over(url, store):
    found = pickle.loads(stock_metadata(url, store))
    for data in (["own"], {"step": 5}, {"step": ("a", 1.5)}):
        found.planner_data = data
        assert decode_pickle(pickle.dumps(found), "x").planner_data is None


class _Reversed(StreamTransformExtension):
    @staticmethod
    def registry_name():
        return "stream.reversed"

    @staticmethod
    def from_descriptor(version):
        return _Reversed()

    def get_descriptor(self):
        return "stream.reversed/1"

    def transform_to(self, output):
        class Stream(io.RawIOBase):
            def write(self, data):
                return output.write(bytes(data)[::-1])

        return Stream()

    def transform_from(self, input):
        raise NotImplementedError


def test_transformed_tensors_are_refused_by_name(url):
    dcp.save({"w": torch.zeros(3)}, storage_writer=FsspecWriter(f"{url}/run", _extensions=[_Reversed()]))
    with pytest.raises(InvalidInputError, match=r"w was stored through .*stream\.reversed/1"):
        TierReader(f"{url}/run").read_metadata()


def test_metadata_without_the_newer_members_is_read():
    places = {MetadataIndex("a", (0,)): _StorageInfo("__0_0.distcp", 0, 10)}
    found = Metadata({}, None, places)
    for name in ("storage_meta", "version"):
        del found.__dict__[name]
    assert decode_pickle(pickle.dumps(found), "x").storage_data == {
        MetadataIndex("a", (0,)): StockPlace("__0_0.distcp", 0, 10)
    }
