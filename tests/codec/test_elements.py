"""Find the elements in safetensors and ``torch.save`` files: valid, damaged and hostile ones."""

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import safetensors.torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierfs.codec.layout import HEAD_BYTES_MAX
from tierfs.codec.layout import torch_zip as torchzip
from tierfs.codec.layout.elements import Span, spans
from tierfs.codec.layout.safetensors import read_table
from tierfs.codec.layout.torch_zip import storages_in
from tierfs.errors import CorruptionError

KINDS = {
    torch.float64: (8, "float"),
    torch.float32: (4, "float"),
    torch.float16: (2, "float"),
    torch.bfloat16: (2, "float"),
    torch.float8_e4m3fn: (1, "float"),
    torch.float8_e5m2: (1, "float"),
    torch.float8_e8m0fnu: (1, "float"),
    torch.complex64: (4, "float"),
    torch.int64: (8, "integer"),
    torch.int32: (4, "integer"),
    torch.int16: (2, "integer"),
    torch.int8: (1, "integer"),
    torch.uint64: (8, "integer"),
    torch.uint32: (4, "integer"),
    torch.uint16: (2, "integer"),
    torch.uint8: (1, "integer"),
    torch.bool: (1, "integer"),
}
NOT_IN_SAFETENSORS = {
    torch.complex128: (8, "float"),
    torch.float8_e4m3fnuz: (1, "float"),
    torch.float8_e5m2fnuz: (1, "float"),
}


def spans_of(data):
    def read(at, out):
        assert 0 <= at <= at + len(out) <= len(data)
        out[:] = data[at : at + len(out)]

    found = spans(read, len(data))
    at = 0
    for span in found:
        assert span.start == at < span.stop
        assert span.width in {1, 2, 4, 8}
        assert span.kind in {"float", "integer", "bytes"}
        at = span.stop
    assert not found or at == len(data)
    named = [span.name for span in found if span.name]
    assert len(set(named)) == len(named)
    return found


def named(data):
    return {span.name: span for span in spans_of(data) if span.name}


def state(kinds):
    made = {}
    for number, dtype in enumerate(kinds):
        words = torch.arange(16 * (number + 1), dtype=torch.uint8)
        made[str(dtype).removeprefix("torch.")] = words.view(dtype) if dtype != torch.bool else words % 2 == 1
    return made


def raw(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def safetensors_file(table, data=b""):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


# -- valid files -------------------------------------------------------------------------------------------------------


def test_a_safetensors_file_is_its_header_and_its_tensors():
    tensors = state(KINDS)
    data = safetensors.torch.save(tensors, metadata={"step": "7"})
    found = named(data)
    assert found.keys() == tensors.keys()
    for (name, tensor), kind in zip(tensors.items(), KINDS.values(), strict=True):
        assert (found[name].width, found[name].kind) == kind
        assert data[found[name].start : found[name].stop] == raw(tensor)
    header = spans_of(data)[0]
    assert header == Span(0, 8 + int.from_bytes(data[:8], "little"), 1, "", "bytes")


def test_a_safetensors_dtype_that_nobody_knows_is_bytes():
    data = safetensors_file({"a": entry(0, 3, "F6_E2M3", [4]), "b": entry(3, 8, "NEW", [9])}, bytes(8))
    assert [(span.name, span.width, span.kind) for span in spans_of(data)] == [
        ("", 1, "bytes"),
        ("a", 1, "bytes"),
        ("b", 1, "bytes"),
    ]


def test_tensors_without_bytes_are_no_spans():
    data = safetensors.torch.save({"a": torch.zeros(0), "b": torch.zeros(2), "c": torch.zeros(3, 0)})
    assert list(named(data)) == ["b"]


def test_a_safetensors_file_without_tensors_is_a_header():
    data = safetensors.torch.save({})
    assert spans_of(data) == [Span(0, len(data), 1, "", "bytes")]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_of_torch_save_is_its_storages_and_gaps(protocol):
    kinds = KINDS | NOT_IN_SAFETENSORS
    tensors = state(kinds)
    data = saved({"step": 3, "note": "storage", "state": tensors, "empty": torch.zeros(0)}, pickle_protocol=protocol)
    found = named(data)
    assert found.keys() == {f"data/{number}" for number in range(len(tensors))}
    for number, (tensor, kind) in enumerate(zip(tensors.values(), kinds.values(), strict=True)):
        span = found[f"data/{number}"]
        assert (span.width, span.kind) == kind
        assert data[span.start : span.stop] == raw(tensor)


def test_shared_strided_and_wrapped_tensors_are_their_storages():
    base = torch.arange(24, dtype=torch.float32)
    data = saved([base.view(4, 6).T, base[3:5], torch.nn.Parameter(torch.ones(5, dtype=torch.float16)), torch.zeros(0)])
    found = named(data)
    assert [(span.name, span.stop - span.start, span.width) for span in found.values()] == [
        ("data/0", 96, 4),
        ("data/1", 10, 2),
    ]
    assert data[found["data/0"].start :][:96] == raw(base)


def test_the_state_of_an_optimizer_is_found():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    data = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
    kinds = [(span.width, span.kind) for span in named(data).values()]
    assert sorted(kinds) == [(1, "integer")] + [(4, "float")] * 8


def test_storages_between_empty_ones_are_found():
    data = saved({"a": torch.zeros(0), "b": torch.ones(4), "c": torch.zeros(0), "d": torch.ones(5)})
    assert sorted(span.stop - span.start for span in named(data).values()) == [16, 20]


# -- archives as torch writes them over 4 GiB, made by hand ------------------------------------------------------------


def record(at, name, data, *, wide=False, sizes=None, flags=0x0808, method=0):
    """Return one record as torch writes it, padded so that its data begins at a multiple of 64."""
    padding = -(at + 30 + len(name) + 4) % 64
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, flags, method, 0, 0, 0, 0, 0, len(name), len(extra))
    sizes = sizes or (len(data), len(data))
    return header + name + extra + data + b"PK\7\x08" + struct.pack("<IQQ" if wide else "<III", 7, *sizes)


def archive(*records, end=b"PK\1\2" + bytes(60), **options):
    made = b""
    for name, data in records:
        made += record(len(made), name, data, **options)
    return made + end


PICKLE = zipfile.ZipFile(io.BytesIO(saved([torch.zeros(10), torch.zeros(3, dtype=torch.int64)]))).read(
    "archive/data.pkl"
)
RECORDS = ((b"x/data.pkl", PICKLE), (b"x/byteorder", b"little"), (b"x/data/0", bytes(40)), (b"x/data/1", bytes(24)))


@pytest.mark.parametrize("wide", [False, True])
def test_sizes_of_four_and_of_eight_bytes_are_read(wide):
    data = archive(*RECORDS, (b"x/version", b"3\n"), wide=wide)
    assert [(span.name, span.stop - span.start, span.width) for span in named(data).values()] == [
        ("data/0", 40, 4),
        ("data/1", 24, 8),
    ]


# -- damaged and hostile files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\3\4",
        b"PK\3\4" + bytes(5),
        b"PK\3\4" + bytes(100),
        bytes(9),
        bytes(1000),
        archive(*RECORDS, sizes=(1, 2)),
        archive(*RECORDS, flags=0x0809),
        archive(*RECORDS, method=8),
        archive(*RECORDS, end=b""),
        archive(*RECORDS, end=b"else" * 10),
        archive(*RECORDS[2:]),
        archive((b"x/data.pkl", b"no pickle"), *RECORDS[1:2], end=b""),
        archive(*RECORDS[:2], (b"x/data/0", bytes(41)), RECORDS[3]),
        safetensors_file({"a": entry(0, 4)}, bytes(3)),
        safetensors_file({"a": entry(0, 4), "b": entry(3, 8)}, bytes(8)),
        safetensors_file({"a": entry(0, 4), "b": entry(5, 8)}, bytes(8)),
        safetensors_file({"a": entry(4, 0, shape=[0])}, bytes(8)),
        safetensors_file({"a": entry(0, 4, "F32", [2])}, bytes(4)),
        safetensors_file({"a": entry(0, 4, shape=[-4])}, bytes(4)),
        safetensors_file({"a": entry(0, 1, shape="")}, bytes(1)),
        safetensors_file({"a": entry(0, 1, shape={})}, bytes(1)),
        safetensors_file({"a": entry(0, 1 << 63)}, bytes(4)),
        safetensors_file({"a": [0, 4]}, bytes(4)),
        safetensors_file({"a": {"dtype": "U8", "shape": {}, "data_offsets": "01"}}, bytes(4)),
        safetensors_file(b'{"a":' * 3000, bytes(4)),
        safetensors_file(b'{"a": 1, "a": 2}'),
        safetensors_file(b"{\xff}"),
        safetensors_file(b"[1]"),
        (HEAD_BYTES_MAX + 1).to_bytes(8, "little") + b"{" * 100,
        (1 << 63).to_bytes(8, "little") + b"{" * 100,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_file_that_is_damaged_or_lies_is_unknown(data):
    assert spans_of(data) == []


def test_a_storage_that_is_there_twice_counts_once():
    data = archive(*RECORDS, (b"x/data/1", bytes(24)))
    assert list(named(data)) == ["data/0", "data/1"]


def test_records_that_the_pickle_does_not_name_are_bytes():
    data = archive(*RECORDS, (b"x/data/7", bytes(24)))
    assert list(named(data)) == ["data/0", "data/1"]
    assert spans_of(data)[-1].name == ""


def test_endless_empty_records_are_not_followed():
    empty = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"e"
    reads = []
    data = archive(*RECORDS, end=empty * 10_000)

    def read(at, out):
        reads.append(at)
        out[:] = data[at : at + len(out)]

    assert len(spans(read, len(data))) > 0
    assert len(reads) < 200


class _Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path):
    data = saved({"a": _Hostile(tmp_path / "made"), "b": torch.ones(6)})
    assert [(span.name, span.width) for span in named(data).values()] == [("data/0", 4)]
    assert not (tmp_path / "made").exists()
    torch.load(io.BytesIO(data), weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "pickle",
    [
        b"",
        b".",
        b"0.",
        b"t.",
        b"(0t.",
        b"h\x07.",
        b"R.",
        b"\x93.",
        b"q\x00.",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x8d" + b"\xff" * 8 + b".",
        b"\x8b\xff\xff\xff\x7f.",
        b"Q",
        b"((((((" * 1000,
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x01\x00\x00\x00cJ\xff\xff\xff\xfftQ.",
    ],
)
def test_a_damaged_pickle_names_no_storage(pickle):
    assert storages_in(pickle) == {}


@given(st.binary(max_size=200), st.integers(0, len(PICKLE)))
def test_any_pickle_is_followed_without_an_error(data, at):
    storages_in(data)
    storages_in(PICKLE[:at] + data + PICKLE[at:])


REAL = (
    saved(
        {"a": torch.arange(50), "b": torch.ones(9).bfloat16(), "c": torch.ones(4).to(torch.float8_e5m2), "n": [1, "x"]}
    ),
    saved(torch.nn.Linear(3, 4).state_dict(), pickle_protocol=4),
    safetensors.torch.save({"a": torch.arange(50), "b": torch.ones(9), "é": torch.zeros(3, 0)}, metadata={"k": "v"}),
    archive(*RECORDS, wide=True),
)


@given(
    st.sampled_from(REAL),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4),
    st.integers(0, 1 << 16),
)
@example(REAL[0], [(0, 0, b"")], 0)
def test_no_damage_is_an_error(data, changes, end):
    for at, gone, put in changes:
        at %= len(data) + 1
        data = data[:at] + put + data[at + gone :]
    spans_of(data)
    spans_of(data[: end % (len(data) + 1)])


# -- errors and limits -------------------------------------------------------------------------------------------------


def test_a_table_that_ends_before_the_data_do_is_refused():
    data = safetensors_file({"a": entry(0, 4)}, bytes(5))
    with pytest.raises(CorruptionError, match="its tensors end at 4, and its data at 5"):
        read_table(lambda at, out: out.__setitem__(slice(None), data[at : at + len(out)]), len(data), "file")


@pytest.mark.parametrize("what", ["global", "record"])
def test_names_that_a_pickle_makes_of_names_are_bounded(what):
    if what == "global":  # each opcode doubles the name
        steps = b"\x8c\x04name\x94" + b"".join(b"h%ch%c\x93\x94" % (number, number) for number in range(60))
        pickle = b"\x80\x04" + steps + b"."
    else:  # each reference uses the name of 1 MiB again
        head = b"X\x07\x00\x00\x00storage\x94ctorch\nFloatStorage\n\x94X\x00\x00\x10\x00" + b"k" * (1 << 20) + b"\x94"
        pickle = b"\x80\x04" + head + b"(h\x00h\x01h\x02h\x00K\x01tQ" * 4096 + b"."
    tracemalloc.start()
    try:
        assert storages_in(pickle) == {}
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_pickle_that_is_too_much_work_names_no_storage(monkeypatch):
    monkeypatch.setattr(torchzip, "_OPCODES_MAX", 20_000)
    many = pickle.dumps(list(range(9000)), protocol=2)
    assert storages_in(PICKLE)
    assert storages_in(many[:-1] + PICKLE[2:]) == storages_in(PICKLE)
    monkeypatch.setattr(torchzip, "_OPCODES_MAX", 9000)
    assert storages_in(many[:-1] + PICKLE[2:]) == {}
