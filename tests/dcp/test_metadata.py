"""The metadata of a checkpoint as a document: what it restores, and which documents are refused."""

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfs import digest
from tierfs.dcp import columns
from tierfs.dcp import metadata as metadata_module
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.metadata import decode, encode
from tierfs.dcp.tensorbytes import DTYPES
from tierfs.errors import CorruptionError, FormatError, InvalidInputError

FILE = "rank-00000-1a2b3c4d.safetensors"
NOTE = CheckpointNote("c0ffee", 3, 1_700_000_000_000_000_000, 100, {FILE: 1 << 20})


def tensor_of(dtype, shape, boxes, places, fqn, at=0):
    chunks = []
    for offsets, sizes in boxes:
        length = torch.Size(sizes).numel() * dtype.itemsize
        places[MetadataIndex(fqn, offsets)] = BytesPlace(FILE, at, length)
        at += length
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def metadata():
    places = {MetadataIndex("step"): BytesPlace(FILE, 10, 100)}
    items = {
        "w": tensor_of(torch.bfloat16, (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))], places, "w"),
        "scalar": tensor_of(torch.float32, (), [((), ())], places, "scalar"),
        "empty": tensor_of(torch.int64, (0, 3), [((0, 0), (0, 3))], places, "empty"),
        "step": BytesStorageMetadata(),
    }
    paths = {"w": ("layers", 0, "w"), "scalar": ("layers", "0", "ünïcode"), "empty": ("empty",), "step": ("step",)}
    found = Metadata(items, paths, places, StorageMeta("tierfs::file:///x", "id", None, ["a"]))
    found.version = "1.0.0"
    return found


def document(data=None):
    return json.loads(data or encode(metadata(), NOTE))


def sealed(changed):
    """Return the document with a valid checksum."""
    changed.pop("checksum", None)
    text = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return json.dumps({**changed, "checksum": digest.checksum(text).hex()}).encode()


def written(changed):
    """Return the document with a valid checksum, in the form in which `encode` writes it."""
    changed.pop("checksum", None)
    return stamped(json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def stamped(text):
    """Return a text with a valid checksum in front, whatever the text is."""
    canonical = text.encode()
    return f'{{"checksum":"{digest.checksum(canonical).hex()}",'.encode() + canonical[1:]


def outcome(read, data):
    """Return everything that `read` finds in the data, or its error."""
    try:
        found, note = read(data)
    except (CorruptionError, FormatError) as error:
        return type(error), str(error)
    return found.state_dict_metadata, dict(found.storage_data), found.planner_data, found.storage_meta, note


def as_any_json(data):
    return metadata_module.interpret(metadata_module.parse(data, "x"), "x")


def test_metadata_survives_a_round_trip():
    found, note = decode(encode(metadata(), NOTE), "x")
    assert found == metadata()
    assert note == NOTE
    assert found.planner_data["w"] == ("layers", 0, "w")
    assert found.planner_data["scalar"] == ("layers", "0", "ünïcode")
    assert decode(encode(found, replace(note, step=None)), "x")[1].step is None
    of_a_run = replace(note, kind="light", run="ab")
    assert decode(encode(found, of_a_run), "x")[1] == of_a_run


def test_the_metadata_that_comes_back_can_be_pickled_as_torch_does():
    found = decode(encode(metadata(), NOTE), "x")[0]
    assert pickle.loads(pickle.dumps(found)) == found


def test_torchs_own_reader_refuses_it_aloud():
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(encode(metadata(), NOTE))


def test_members_of_a_later_writer_are_passed_over():
    assert decode(sealed({**document(), "later": [1]}), "x")[1] == NOTE


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_a_name(name):
    places = {}
    item = tensor_of(DTYPES[name], (2, 3), [((0, 0), (2, 3))], places, "t")
    found = decode(encode(Metadata({"t": item}, None, places), NOTE), "x")[0]
    assert found.state_dict_metadata["t"].properties.dtype is DTYPES[name]
    assert found.planner_data is None


def test_properties_of_a_tensor_come_back():
    places = {}
    item = tensor_of(torch.float32, (1, 2, 3, 4), [((0,) * 4, (1, 2, 3, 4))], places, "t")
    item.properties = TensorProperties(torch.float32, torch.strided, True, torch.channels_last, True)
    found = decode(encode(Metadata({"t": item}, {}, places), NOTE), "x")[0]
    assert found.state_dict_metadata["t"].properties == item.properties


@pytest.mark.parametrize("path", [("a", 1.5), ("a", True), ("a", None), (), "a", ("a", ("b",))], ids=str)
def test_a_path_that_json_would_change_is_refused_by_name(path):
    broken = metadata()
    broken.planner_data["w"] = path
    with pytest.raises(InvalidInputError, match="w: its path"):
        encode(broken, NOTE)


def test_unreadable_metadata_is_not_written():
    broken = metadata()
    broken.storage_data[MetadataIndex("w", (0, 0))] = BytesPlace(FILE, 0, 5)
    with pytest.raises(InvalidInputError, match=r"'w': chunks\[0\]: 5 bytes"):
        encode(broken, NOTE)
    broken.storage_data[MetadataIndex("w", (0, 0))] = BytesPlace("other", 0, 24)
    with pytest.raises(InvalidInputError, match="not inside a file"):
        encode(broken, NOTE)
    del broken.storage_data[MetadataIndex("w", (0, 0))]
    with pytest.raises(InvalidInputError, match=r"w at \[0, 0\]: the metadata does not say where"):
        encode(broken, NOTE)


@pytest.mark.parametrize(
    "wrong", [BytesPlace(FILE, (1 << 20) - 23, 24), BytesPlace(FILE, -1, 24), BytesPlace("x", 0, 24)]
)
def test_a_tensor_cut_like_an_earlier_one_is_checked(wrong):
    places = {}
    items = {
        name: tensor_of(torch.float32, (2, 3), [((0, 0), (2, 3))], places, name, at) for at, name in enumerate("abc")
    }
    found = decode(encode(Metadata(items, None, places), NOTE), "WHERE")[0]
    assert {index.fqn: place for index, place in found.storage_data.items()} == {
        name: BytesPlace(FILE, at, 24) for at, name in enumerate("abc")
    }
    places[MetadataIndex("b", (0, 0))] = wrong
    with pytest.raises(InvalidInputError, match="'b': chunks"):
        encode(Metadata(items, None, places), NOTE)


def test_names_that_are_no_text_are_refused():
    for name in (5, "a\ud800"):
        with pytest.raises(InvalidInputError):
            encode(Metadata({name: BytesStorageMetadata()}, None, {MetadataIndex(name): BytesPlace(FILE, 0, 1)}), NOTE)


@given(st.data())
def test_a_flipped_bit_is_noticed(data):
    encoded = bytearray(encode(metadata(), NOTE))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptionError, FormatError), match="WHERE"):
        decode(bytes(encoded), "WHERE")


@given(st.integers(0, 2000))
def test_a_document_that_was_cut_short_is_noticed(length):
    encoded = encode(metadata(), NOTE)
    with pytest.raises(CorruptionError, match="WHERE"):
        decode(encoded[: min(length, len(encoded) - 1)], "WHERE")


def test_another_version_is_refused():
    with pytest.raises(FormatError, match=r"WHERE.*checkpoint's format is 2"):
        decode(sealed({**document(), "version": 2}), "WHERE")


def test_a_dtype_that_torch_does_not_know_is_a_matter_of_version():
    changed = document()
    changed["tensors"]["w"]["dtype"] = "float3"
    with pytest.raises(FormatError, match=r"WHERE.*'w'.*float3"):
        decode(sealed(changed), "WHERE")


CHUNK = ("tensors", "w", "chunks", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("save_id",), "../x"),
        (("save_id",), None),
        (("sequence",), -1),
        (("sequence",), True),
        (("created_ns",), "now"),
        (("created_ns",), 1 << 63),
        (("step",), "one"),
        (("files",), []),
        (("files", "../x"), {"length": 1}),
        (("files", ".hidden"), {"length": 1}),
        (("files", "a/b"), {"length": 1}),
        (("files", ""), {"length": 1}),
        (("files", FILE), {}),
        (("files", FILE), {"length": 30}),
        (("tensors",), None),
        (("tensors", "w"), 1),
        (("tensors", "w", "shape"), [4, -6]),
        (("tensors", "w", "shape"), [4, 1 << 64]),
        (("tensors", "w", "shape"), [3, 6]),
        (("tensors", "w", "shape"), [1] * 65),
        (("tensors", "w", "dtype"), 5),
        (("tensors", "w", "requires_grad"), 1),
        (("tensors", "w", "chunks"), {}),
        ((*CHUNK, "offsets"), [0]),
        ((*CHUNK, "offsets"), [3, 0]),
        ((*CHUNK, "offsets"), [2, 0]),
        ((*CHUNK, "offsets"), [0, True]),
        ((*CHUNK, "shape"), [2, 5]),
        ((*CHUNK, "at"), (1 << 20) - 1),
        ((*CHUNK, "length"), 25),
        ((*CHUNK, "file"), "elsewhere"),
        ((*CHUNK, "file"), None),
        (("objects", "w"), {"file": FILE, "at": 0, "length": 1}),
        (("objects", "step"), {"file": FILE, "at": 0}),
        (("paths", "w"), []),
        (("paths", "w"), ["a", 1.5]),
        (("paths", "w"), ["a", None]),
        (("paths", "w"), [1 << 70]),
        (("paths", "w"), "a"),
        (("storage_meta",), None),
        (("storage_meta", "modules"), [1]),
        (("storage_meta", "save_id"), 1),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused_though_the_checksum_fits(path, value):
    changed = document()
    inner = changed
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(CorruptionError, match="WHERE"):
        decode(sealed(changed), "WHERE")
    with pytest.raises(CorruptionError, match="WHERE"):
        decode(written(changed), "WHERE")


def test_no_object_is_made_of_a_chunk_that_torch_does_not_need(monkeypatch):
    places = {}
    boxes = [((row, 0), (1, 6)) for row in range(64)]
    items = {f"t{number}": tensor_of(torch.float32, (64, 6), boxes, places, f"t{number}") for number in range(5)}
    data = encode(Metadata(items, None, places), replace(NOTE, files={FILE: 1 << 40}))
    monkeypatch.setattr(metadata_module, "parse", None)  # so the general JSON parser cannot be used
    made = []
    monkeypatch.setattr(columns, "BytesPlace", lambda *values: made.append(values) or BytesPlace(*values))
    found, _ = decode(data, "x")
    assert found.state_dict_metadata == items
    # Tensors that are cut alike share their chunk objects.
    assert len({id(chunk) for item in found.state_dict_metadata.values() for chunk in item.chunks}) == 64
    assert not made
    assert found.storage_data[MetadataIndex("t3", (7, 0))] == places[MetadataIndex("t3", (7, 0))]
    assert len(made) == 1
    assert len(found.storage_data) == len(places)
    assert MetadataIndex("t3", (7, 1)) not in found.storage_data
    assert MetadataIndex("t3") not in found.storage_data
    assert MetadataIndex("t9", (7, 0)) not in found.storage_data
    assert found.storage_data == places


CHUNKS = encode(metadata(), NOTE).decode().partition('"w":{"chunks":')[2].partition(',"dtype"')[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"at":0', '"at":00'),
        ('"at":0', '"at":-0'),
        ('"at":0', '"at":1.0'),
        ('"at":0', '"at":99999999999999999999'),
        ('"at":0', f'"at":{(1 << 63) - 1}'),
        ('"at":0,', '"at":0,"at":0,'),
        ('"offsets":[0,0]', '"offsets":[0,00]'),
        ('"offsets":[0,0]', '"offsets":[0,,0]'),
        ('"offsets":[0,0]', '"offsets":[0,0,]'),
        ('"offsets":[0,0]', '"offsets":[]'),
        ('"offsets":[2,0]', '"offsets":[0,0]'),
        ('"shape":[2,6]', '"shape":[2,60]'),
        ('"shape":[2,6]', f'"shape":[{1 << 62},6]'),
        ("},{", "},,{"),
        ("},{", "} ,{"),
        ("},{", "},x{"),
        ("}]", "},]"),
        ("}]", "}}]"),
        ("}]", "}"),
        (CHUNKS, "[]"),
        (CHUNKS, "[0]"),
        (CHUNKS, '[{"at":0}]'),
        ('"dtype":"bfloat16"', '"dtype":"bfloat16" '),
        ('"dtype":"bfloat16"', '"dtype":"float3"'),
        ('"layout":"strided"', '"layout":"none"'),
        ('"pin_memory":false', '"pin_memory":0'),
        ('"w":{"chunks"', '"a\\u0020b\\"c":{"chunks"'),
        ('"w":{"chunks"', '"\\ud800":{"chunks"'),
        ('"w":{"chunks"', '"a\nb":{"chunks"'),
        ('"w":{"chunks"', '"empty":{"chunks"'),
        ('"w":{"chunks"', '"tensors":{"chunks"'),
        ('"objects":{"step"', '"objects":{"tensors"'),
        ('"objects":{"step"', '"objects":{"a":{"at":0,"file":"x","length":1},"tensors"'),
        ('"objects":{"step"', f'"objects":{{"a":{{"at":0,"file":"{FILE}","length":1}},"tensors"'),
        ('"paths":{', '"paths":{"a":[","],"tensors":["b"],'),
        ('"paths":{', '"paths":{"a":[",\\"tensors\\":{"],'),
        ('"sequence":3', '"sequence":3,"tensors":{}'),
        ('"sequence":3', '"sequence":3,"sequence":3'),
        ('"version":1}', '"version":1 }'),
        ('"version":1}', '"later":1,"version":1}'),
        ('"version":1}', '"version":2}'),
        ('"tensors":{', '"tensors":{ '),
        (',"tensors":{', ',"tensors":{},"other":{'),
    ],
    ids=str,
)
def test_a_document_that_is_nearly_as_written_means_the_same_to_both_readers(before, after):
    text = "{" + encode(metadata(), NOTE).decode().partition(",")[2]
    assert before in text
    data = stamped(text.replace(before, after, 1))
    assert outcome(lambda data: decode(data, "x"), data) == outcome(as_any_json, data)


@given(st.data())
def test_a_document_with_any_change_means_the_same_to_both_readers(data):
    text = "{" + encode(metadata(), NOTE).decode().partition(",")[2]
    start = data.draw(st.integers(1, len(text)))
    length = data.draw(st.integers(0, 8))
    pieces = [
        "0",
        "1",
        ",",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ":",
        " ",
        "tensors",
        "x",
        "é",
        "\n",
        text[start : start + 5],
    ]
    new = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=3)))
    changed = stamped(text[:start] + new + text[start + length :])
    assert outcome(lambda data: decode(data, "x"), changed) == outcome(as_any_json, changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"format":"tierfs-checkpoint","version":1,"version":1}',
        b"\xff",
        b"null",
        b"\x80\x04.",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_bytes_that_are_no_document_are_refused(data):
    with pytest.raises(CorruptionError, match="WHERE"):
        decode(data, "WHERE")


@pytest.mark.parametrize("name", ["x", "version", "tensors"])
def test_metadata_nested_too_deeply_is_refused(name):
    for depth in range(800, 1000):
        deep = b"[" * depth + b"]" * depth
        members = {b"format": b'"tierfs-checkpoint"', b"version": b"1", name.encode(): deep}
        with pytest.raises((CorruptionError, FormatError), match="WHERE"):
            decode(b"{" + b",".join(b'"' + key + b'":' + value for key, value in members.items()) + b"}", "WHERE")


def test_a_name_that_is_no_unicode_is_shown_and_not_all_that_stands_beside_it():
    places = {}
    boxes = [((row, 0), (1, 6)) for row in range(1000)]
    found = Metadata({"a\udcff": tensor_of(torch.float32, (1000, 6), boxes, places, "a\udcff")}, {}, places)
    with pytest.raises(InvalidInputError, match=r"'a\\udcff': .* valid Unicode") as refused:
        encode(found, NOTE)
    assert len(str(refused.value)) < 200
