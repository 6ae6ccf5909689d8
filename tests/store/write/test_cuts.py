"""Ends of chunks in a file that is being written."""

import contextlib
import io
import itertools
import json
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.codec.layout.elements import spans
from tierfs.digest import CHUNK_BYTES
from tierfs.store import Writer, load
from tierfs.store.write import sink
from tierfs.store.write.sink import LARGE_BYTES, Cutter

MIB = 1 << 20
SMALL_CHUNK, SMALL_LARGE = 4096, 512


def ends_of(data, pieces=None, **options):
    """Return the ends of a file's chunks, without the last one."""
    cutter, view, found, at = Cutter(**options), memoryview(data), [], 0
    for length in pieces or [len(data)]:
        piece = view[at : at + length]
        ends = cutter.ends(piece)
        assert all(0 < end <= len(piece) for end in ends)
        found += [at + end for end in ends]
        at += len(piece)
    assert at == len(data)
    begins = [0, *found]
    assert all(0 < end - begin <= sink.CHUNK_BYTES for begin, end in itertools.pairwise(begins))
    assert len(data) - begins[-1] < sink.CHUNK_BYTES
    return found


def tensor(length, seed=0):
    if length % 4:
        return torch.zeros(length, dtype=torch.uint8)
    return torch.arange(seed, seed + length // 4, dtype=torch.int32)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def starts_in(data):
    def read(at, out):
        out[:] = data[at : at + len(out)]

    return {span.name: span.start for span in spans(read, len(data)) if span.name}


@contextlib.contextmanager
def small_chunks():
    """Chunks so small that a test can try every position in a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "CHUNK_BYTES", SMALL_CHUNK)
        patch.setattr(sink, "LARGE_BYTES", SMALL_LARGE)
        yield


LENGTHS = (400, 600, 4, 0, 9000, SMALL_CHUNK, 2 * SMALL_CHUNK, 300, *[500] * 20, 511, 512, 8)
STATE = {f"{number:03}": tensor(length, number) for number, length in enumerate(LENGTHS)}
FILES = {
    "safetensors": safetensors.torch.save(STATE, metadata={"a": "b"}),
    "torch.save": saved(STATE),
    "bytes": random.Random(1).randbytes(30_000),
    "zip of something else": b"PK\3\4" + random.Random(2).randbytes(30_000),
    "a header that ends too early": safetensors.torch.save(STATE)[:150] + bytes(20_000),
    "archive that breaks off": saved(STATE)[:9_000] + random.Random(3).randbytes(20_000),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [7, 4096])
def test_cuts_do_not_depend_on_the_written_pieces(name, length):
    data = FILES[name]
    with small_chunks():
        assert ends_of(data, [length] * (len(data) // length) + [len(data) % length]) == ends_of(data)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.lists(st.integers(50, 9000), min_size=1, max_size=8))
def test_a_chunks_content_is_known_at_its_end(name, lengths):
    view = memoryview(FILES[name])
    whole = spans(lambda at, out: out.__setitem__(slice(None), view[at : at + len(out)]), len(view))
    with small_chunks():
        cutter, at, start = Cutter(), 0, 0
        for length in itertools.cycle(lengths):
            ends = [at + end for end in cutter.ends(view[at : at + length])]
            at = min(at + length, len(view))
            for stop in dict.fromkeys([*ends, *([len(view)] if at == len(view) else [])]):
                found = cutter.layout(start, stop)
                assert found[0].start <= start < stop <= found[-1].stop
                assert all(before.stop == after.start for before, after in itertools.pairwise(found))
                if whole:
                    named = [span for span in whole if span.name and span.start < stop and span.stop > start]
                    assert [span for span in found if span.name] == named
                start = stop
            if at == len(view):
                break


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.integers(0, 9000), max_size=8),
    st.integers(0, 40_000),
    st.binary(max_size=9),
)
def test_nor_does_that_of_a_damaged_one(name, lengths, at, put):
    data = FILES[name]
    data = data[:at] + put + data[at + len(put) :]
    ends, left = [], len(data)
    for length in lengths:
        ends.append(min(length, left))
        left -= ends[-1]
    with small_chunks():
        assert ends_of(data, [*ends, left]) == ends_of(data)


def test_files_without_a_table_are_cut_each_16_mib():
    assert ends_of(bytes(40 * MIB)) == [16 * MIB, 32 * MIB]
    assert ends_of(bytes(32 * MIB)) == [16 * MIB, 32 * MIB]


def test_a_table_in_the_middle_of_a_file_is_none():
    data = safetensors.torch.save({"a": tensor(17 * MIB), "b": tensor(2 * MIB)})
    assert ends_of(data, at_start=False) == [16 * MIB]


def test_a_safetensors_file_is_cut_at_its_header_and_around_large_tensors():
    lengths = [100, LARGE_BYTES - 4, LARGE_BYTES, 8, 20 * MIB, 16 * MIB, 4, 4]
    data = safetensors.torch.save({f"{number}": tensor(length) for number, length in enumerate(lengths)})
    begin = 8 + int.from_bytes(data[:8], "little")
    at = list(itertools.accumulate(lengths, initial=begin))
    assert ends_of(data) == [at[0], at[2], at[3], at[4], at[4] + 16 * MIB, at[5], at[6], at[8]]


def test_a_torch_file_is_cut_where_the_data_of_large_storages_begin():
    lengths = [100, LARGE_BYTES - 4, LARGE_BYTES, 8, 20 * MIB, 16 * MIB, 4]
    data = saved([tensor(length) for length in lengths])
    at = starts_in(data)
    ends = ends_of(data)
    assert ends[:5] == [at["data/0"], at["data/2"], at["data/3"], at["data/4"], at["data/4"] + 16 * MIB]
    # 16 MiB of data leave no room for the next record's header, which makes a chunk of its own.
    assert ends[5:8] == [at["data/5"], at["data/5"] + 16 * MIB, at["data/6"]]
    assert data[ends[8] :].startswith(b"3\n")
    assert len(ends) == 9


@pytest.mark.parametrize("save", [safetensors.torch.save, saved])
def test_a_longer_header_moves_no_cut(save):
    tensors = {f"layer.{number}": tensor(length, number) for number, length in enumerate([3 * MIB, 700, 17 * MIB, 900])}
    short, long = save(tensors), save({**tensors, "x" * 900: torch.zeros(0)})
    parts = [
        {data[begin:end] for begin, end in itertools.pairwise([0, *ends_of(data), len(data)])} for data in (short, long)
    ]
    new = parts[1] - parts[0]
    assert sum(map(len, new)) < 10_000
    assert len(parts[0] & parts[1]) >= 4


@pytest.mark.parametrize("save", [safetensors.torch.save, saved])
def test_many_small_tensors_make_few_chunks(save):
    data = save({f"{number:05}": tensor(8 << 10, number) for number in range(4000)})
    assert len(ends_of(data)) <= -(-len(data) // CHUNK_BYTES) + 3


def test_a_header_that_promises_more_than_follows_is_no_error():
    table = json.dumps({"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}).encode()
    data = len(table).to_bytes(8, "little") + table + bytes(33 * MIB)
    begin = 8 + len(table)
    assert ends_of(data) == [begin, begin + 16 * MIB, begin + 32 * MIB]


def test_more_than_a_header_promises_is_cut_each_16_mib():
    data = safetensors.torch.save({"a": tensor(MIB)}) + bytes(33 * MIB)
    begin = len(data) - 34 * MIB
    assert ends_of(data) == [begin, begin + MIB, begin + 17 * MIB, begin + 33 * MIB]


def test_an_archive_that_is_none_behind_a_storage_is_cut_each_16_mib_from_there_on():
    data = bytearray(saved({"a": tensor(2 * MIB), "b": tensor(3 * MIB)}))
    start = starts_in(data)["data/0"]
    data[start + 2 * MIB :] = bytes(40 * MIB)
    assert ends_of(data) == [start, start + 16 * MIB, start + 32 * MIB]


# -- through the sinks -------------------------------------------------------------------------------------------------

MODELS = {
    "safetensors": lambda: safetensors.torch.save(model()),
    "torch.save": lambda: saved(model()),
    "bytes": lambda: bytes(17 * MIB),
}


def model():
    return {"a": tensor(18 * MIB), "b": tensor(9000, 7), "c": tensor(MIB, 9)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [4099, 17 * MIB + 1])
def test_a_file_has_the_same_chunks_in_every_tier(make_host, name, length):
    data = memoryview(MODELS[name]())
    host = make_host(ram=64 * MIB)
    begins = [0, *ends_of(data)]
    wanted = [end - begin for begin, end in itertools.pairwise([*begins, len(data)]) if end > begin]
    for store in (host.store, host.plain()):
        writer = Writer(store, f"model-{store is host.store}")
        for at in range(0, len(data), length):
            writer.write(data[at : at + length])
        manifest = writer.commit()
        assert [row.raw_length for row in manifest.rows] == wanted
        assert load(store, writer.path) == data


@pytest.mark.parametrize("name", MODELS)
def test_a_file_larger_than_the_ram_tier_is_cut_the_same(make_host, name):
    data = MODELS[name]()
    host = make_host(ram=17 * MIB)
    writer = Writer(host.store, "model")
    writer.write(data)
    manifest = writer.commit()
    begins = [0, *ends_of(data)]
    assert [row.raw_length for row in manifest.rows][: len(begins) - 1] == [
        end - begin for begin, end in itertools.pairwise(begins)
    ]
    assert load(host.store, "model") == data
