"""FORMAT.md is complete: a reader written from it alone reads what the package writes, and detects damage."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.independent_reader import (
    INDIRECT,
    INLINE,
    Manifest,
    ReaderError,
    StoreReader,
    decode_key,
    encode_path,
    main,
)
from support.opened import know_no_store
from support.waiting import HANG_S

import tierfs
from tierfs.errors import TierfsError
from tierfs.host.rpc.client import stop_flusher
from tierfs.objects import LocalObjects
from tierfs.session import compose
from tierfs.store import Store, load
from tierfs.store.create import read_descriptor

KIB, MIB = 1 << 10, 1 << 20
SMALL = (0, 1, 17, 64 * KIB, 64 * KIB + 1)
LARGE = (MIB - 1, MIB, MIB + 1, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1)
NOISE = random.Random(1).randbytes(16 * MIB + 256)
TEXT = b"".join(b"%d bottles of beer on the wall\n" % number for number in range(3000))


def content(size: int, seed: int, noisy: bool) -> bytes:
    return (NOISE if noisy else pattern(seed + size))[seed : seed + size]


def pattern(size: int) -> bytes:
    return (TEXT * (size // len(TEXT) + 1))[:size]


def open_store(root: Path | str, digest: str = "xxh3-128") -> fsspec.AbstractFileSystem:
    tierfs.init(f"file://{root}", digest=digest)
    fs, _ = fsspec.url_to_fs(f"tierfs::file://{root}")
    return fs


# -- the package writes what the specification says --------------------------------------------------------------------

odd_names = st.sampled_from(
    ["!", "!21", "a!", "~", "*", "a b", " ", "[x]", "{x}", "a?b", "#", "::", "file:", "%20", "\\", "...", "..a", "é",
     "e\u0301", "\U0001f600", "\x7f", "\n", "store.json", ".tierfs2", "y" * 250, "ü" * 41]
)  # fmt: skip
any_names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=9)
names = (odd_names | any_names).filter(lambda name: name not in (".", "..", ".tierfs"))
trees = st.lists(st.lists(names, min_size=1, max_size=3).map("/".join), min_size=2, max_size=6, unique=True)
sizes = st.sampled_from(SMALL * 6 + LARGE)
contents = st.builds(content, sizes, st.integers(0, 255), st.booleans())
values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(-9, 9), max_size=2)
metadata = st.dictionaries(st.text(max_size=5), values, max_size=3)
places = st.integers(0, 99)
operations = st.lists(
    st.tuples(st.just("write"), places, contents, metadata)
    | st.tuples(st.just("append"), places, contents)
    | st.tuples(st.sampled_from(["rename", "copy", "makedirs"]), places, places)
    | st.tuples(st.sampled_from(["delete", "rmdir"]), places, places),
    min_size=8,
    max_size=16,
)


@dataclass
class Model:
    """The expected content of a store. Its operations skip those whose outcome is undefined."""

    fs: fsspec.AbstractFileSystem
    root: str
    files: dict[str, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    tombstones: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def has_below(self, path: str) -> bool:
        return any(other.startswith(f"{path}/") for other in (*self.files, *self.directories))

    def is_directory(self, path: str) -> bool:
        return path in self.directories or self.has_below(path)

    def put(self, path: str, data: bytes, values: dict[str, Any]) -> None:
        if path in self.files or path in self.tombstones:
            self.replaced.add(path)
        self.tombstones.discard(path)
        self.files[path] = data, values

    def drop(self, path: str) -> None:
        del self.files[path]
        self.tombstones.add(path)

    def refuses(self, path: str) -> bool:
        """Return whether the path is a directory's; if so, check that the package refuses to open a file there."""
        if path in self.files or not self.is_directory(path):
            return False
        with pytest.raises(IsADirectoryError):
            self.fs.open(self.at(path), "wb")
        return True

    def write(self, path: str, data: bytes, values: dict[str, Any]) -> None:
        if self.refuses(path):
            return
        with self.fs.open(self.at(path), "wb", metadata=values) as file:
            file.write(data)
        self.put(path, data, values)

    def append(self, path: str, data: bytes) -> None:
        if not data or self.refuses(path):
            return
        with self.fs.open(self.at(path), "ab") as file:
            file.write(data)
        before, values = self.files.get(path, (b"", {}))
        self.put(path, before + data, values)

    def rename(self, target: str, place: int) -> None:
        for source in self.source(target, place):
            self.fs.mv(self.at(source), self.at(target))
            self.put(target, *self.files[source])
            self.drop(source)

    def copy(self, target: str, place: int) -> None:
        for source in self.source(target, place):
            self.fs.cp_file(self.at(source), self.at(target))
            self.put(target, *self.files[source])

    def source(self, target: str, place: int) -> list[str]:
        """Return one file that may be renamed or copied to the target, or an empty list."""
        sources = sorted(self.files.keys() - {target})
        return [] if not sources or self.is_directory(target) else [sources[place % len(sources)]]

    def delete(self, _path: str, place: int) -> None:
        if self.files:
            path = sorted(self.files)[place % len(self.files)]
            self.fs.rm_file(self.at(path))
            self.drop(path)

    def makedirs(self, path: str, place: int) -> None:
        path = f"{path}/below" if place % 3 else path
        if path not in self.files:
            self.fs.makedirs(self.at(path), exist_ok=True)
        while path and path not in self.files and path not in self.directories:
            self.tombstones.discard(f"{path}/")
            self.directories.add(path)
            path = path.rpartition("/")[0]

    def rmdir(self, _path: str, place: int) -> None:
        empty = sorted(path for path in self.directories - self.files.keys() if not self.has_below(path))
        if empty:
            path = empty[place % len(empty)]
            self.fs.rmdir(self.at(path))
            self.directories.discard(path)
            self.tombstones.add(f"{path}/")

    def check(self) -> None:
        reader = StoreReader(self.root)
        records = reader.records()
        assert reader.files() == sorted(self.files)
        assert set(reader.directories()) == self.directories
        assert set(reader.tombstones()) == self.tombstones
        assert len({record.write_id for record in records.values()}) == len(records)
        for path, (data, values) in self.files.items():
            manifest, info = reader.manifest(path), self.fs.info(self.at(path))
            assert reader.read(path) == data
            assert (manifest.length, manifest.metadata) == (len(data), values)
            assert bool(manifest.previous) == (path in self.replaced)
            assert info["digest"] == manifest.content_digest.hex()
            assert all(Path(self.root, name.key).is_file() for name in reader.chunk_names(path))


@settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(trees, operations)
def test_reader_agrees_with_the_package_on_random_trees(paths: list[str], steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        model = Model(open_store(root), root)
        for name, place, *arguments in steps:
            getattr(model, name)(paths[place % len(paths)], *arguments)
        model.check()


def test_reader_agrees_with_the_package_on_every_size(tmp_path: Path) -> None:
    model = Model(open_store(tmp_path), str(tmp_path))
    for size in SMALL + LARGE:
        for noisy in (False, True):
            path = f"{size} {noisy}"
            model.write(path, content(size, size % 251, noisy), {"size": size})
            model.append(path, content(1 + size % 1000, 7, not noisy))
            model.fs.cp_file(model.at(path), model.at(f"copies/{path}"))
            model.put(f"copies/{path}", *model.files[path])
    model.check()


def test_reader_reads_a_store_with_blake3_digests(tmp_path: Path) -> None:
    blake3 = pytest.importorskip("blake3").blake3
    fs = open_store(tmp_path, "blake3")
    data = content(2 * MIB + 3, 5, noisy=False)
    fs.pipe({f"{tmp_path}/long": data, f"{tmp_path}/short": b"short"})
    reader = StoreReader(tmp_path, blake3=lambda block: bytes(blake3(block).digest()))
    assert (reader.read("long"), reader.read("short")) == (data, b"short")
    with pytest.raises(ReaderError, match="digest blake3"):
        StoreReader(tmp_path)


@given(st.lists(names, min_size=1, max_size=3).map("/".join))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_keys_name_one_path_each(path: str) -> None:
    assert decode_key(f"{encode_path(path)}!") == path
    assert decode_key(f"{encode_path(path)}/!") == f"{path}/"


@pytest.mark.parametrize(
    "key",
    ["a", "!", "/!", "!!", "a!!", "a!/b!", "!41!", "!C3!BC!", "!ff!", ".!", "../a!", "a!2fb!", "!00!", ".tierfs/a!",
     "x" * 251 + "!", "/".join(["y" * 200] * 4) + "/!"],
)  # fmt: skip
def test_keys_that_are_no_path_are_no_record(key: str) -> None:
    assert decode_key(key) is None


# -- the golden files --------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden" / "v1"


def test_reader_reads_the_golden_files() -> None:
    reader, expected = StoreReader(GOLDEN / "store"), json.loads((GOLDEN / "expected.json").read_text())
    assert {path: hashlib.sha256(reader.read(path)).hexdigest() for path in reader.files()} == expected["files"]
    assert (reader.directories(), reader.tombstones()) == (expected["directories"], expected["tombstones"])


# -- encoded chunks, with and without bases ----------------------------------------------------------------------------

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1}
tensors = st.tuples(
    st.sampled_from(sorted(WIDTHS)),
    st.sampled_from([1, 999, 70_001, 70_001, MIB + 8, MIB + 8, 2 * MIB + 4, 2 * MIB + 4]),
    st.sampled_from(["noise", "constant", "alike", "text"]),
    st.sampled_from(["same", "near", "few", "all"]),
    st.booleans(),
)
EVERYTHING = [
    ("F32", 2 * MIB + 4, "alike", "near", True),
    ("F16", MIB + 8, "alike", "few", False),
    ("I64", MIB + 8, "constant", "same", False),
    ("U8", MIB + 7, "noise", "all", False),
    ("U8", MIB + 13, "text", "few", False),
]


def elements(count: int, width: int, kind: str, draw: np.random.Generator) -> np.ndarray:
    """Return random elements as unsigned integers of `width` bytes."""
    if kind == "noise":
        return np.frombuffer(draw.bytes(width * count), f"<u{width}")
    if kind == "text":
        return np.frombuffer(pattern(width * count), f"<u{width}")
    # "alike": the numbers are close to each other, so that their upper bytes are equal.
    spread = 1 << max(3, 4 * width) if kind == "alike" else 1
    start = int(draw.integers(0, 1 << 8 * width - 2))
    return draw.integers(start, start + spread, count).astype(f"<u{width}")


def changed(before: np.ndarray, change: str, draw: np.random.Generator) -> np.ndarray:
    """Return the elements one training step later."""
    after = before.copy()
    if change == "near":
        after += draw.integers(0, 7, after.size).astype(after.dtype)
        after -= after.dtype.type(3)
    elif change == "few":
        after[draw.random(after.size) < 0.004] ^= after.dtype.type(5)
    elif change == "all":
        after = np.frombuffer(draw.bytes(after.nbytes), after.dtype)
    return after


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Convert float32 bit patterns to bfloat16 bit patterns, both as unsigned integers."""
    rounded = (numbers.astype("<u8") + 0x7FFF + (numbers >> 16 & 1)) >> 16
    return np.where(numbers & 0x7FFFFFFF > 0x7F800000, 0x7FFF, rounded).astype("<u2")


def safetensors(named: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """Return a safetensors file of these tensors, one after the other."""
    head, at = {}, 0
    for name, (dtype, values) in named.items():
        head[name] = {"dtype": dtype, "shape": [values.size], "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, values in named.values())


def steps_of(shapes: list[tuple[str, int, str, str, bool]], seed: int) -> list[bytes]:
    """Return the files of two steps. Some float32 tensors have a copy in bfloat16."""
    draw = np.random.default_rng(seed)
    files: list[dict[str, tuple[str, np.ndarray]]] = [{}, {}]
    for number, (dtype, size, kind, change, has_copy) in enumerate(shapes):
        values = elements(max(1, size // WIDTHS[dtype]), WIDTHS[dtype], kind, draw)
        for file in files:
            file[f"{number}.wide"] = dtype, values
            if dtype == "F32" and has_copy:
                file[f"{number}.copy"] = "BF16", bfloat16(values)
            values = changed(values, change, draw)
    return [safetensors(file) for file in files]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """A store with local tiers whose flusher encodes wherever that saves bytes, and the store's directory."""
    (tmp_path / "shm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
        patch.setenv("TIERFS_SHM_DIR", str(tmp_path / "shm"))
        know_no_store(patch)
        root = f"{tmp_path}/store"
        tierfs.init(root)
        options = {"ack": "staged", "ram": "64MiB", "nvme": "0", "codecs": "all"}
        yield fsspec.url_to_fs(f"tierfs::file://{root}", **options, skip_instance_cache=True)[0], root
        for tiers in compose.open_tiers.values():
            tiers.close()
        for directory in (tmp_path / "state").glob("stores/*"):
            stop_flusher(directory, tierfs.__version__, timeout_s=HANG_S)


def load_bare(root: Path | str, path: str) -> bytes:
    """Return a file's content as the package reads it from the object tier."""
    tier = LocalObjects(Path(root))
    return bytes(load(Store(tier, read_descriptor(tier, "bare"), url="bare"), path))


def test_reader_agrees_with_the_package_on_every_codec(staged: tuple[fsspec.AbstractFileSystem, str]) -> None:
    fs, root = staged
    runs = map("".join, itertools.product("abcdefghij", repeat=4))
    codecs: Counter[int] = Counter()

    @settings(max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(tensors, min_size=1, max_size=4), st.integers(0, 1 << 32))
    @example(EVERYTHING, 0)
    def compare(shapes: list[tuple[str, int, str, str, bool]], seed: int) -> None:
        run = next(runs)
        for step, data in enumerate(steps_of(shapes, seed)):
            path = f"{run}/step-{step}/model.safetensors"
            fs.pipe_file(f"{root}/{path}", data)
            fs.wait(f"{root}/{path}", "object")
            reader = StoreReader(root)
            assert reader.read(path) == data
            assert load_bare(root, path) == data
            assert all(Path(root, name.key).is_file() for name in reader.chunk_names(path))
            codecs.update(reader.codecs)

    compare()
    assert set(codecs) == {0, 1, 2, 3, 4, 5, 6}


def test_flipped_bits_in_encoded_chunks_are_refused_by_both_readers(tmp_path: Path) -> None:
    root = Path(shutil.copytree(GOLDEN / "store", tmp_path / "store"))
    sound, draw, outcomes = StoreReader(root), random.Random(21), Counter[str]()
    contents = {path: sound.read(path) for path in sound.files() if path.startswith("codecs/")}
    needed = {path: {name.key for name in sound.chunk_names(path)} for path in contents}
    for key in sorted(set.union(*needed.values())):
        data = (root / key).read_bytes()
        (envelope,) = struct.unpack_from("<I", data, 12)
        heads, last = range(envelope, min(envelope + 60, len(data))), range(len(data) - 1, len(data))
        for where in (range(12, envelope), range(len(data)), heads, heads, heads, heads, last):
            place, bit = draw.choice(where), 1 << draw.randrange(8)
            (root / key).write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            for path in (path for path in contents if key in needed[path]):
                found = [
                    outcome(read, path, contents[path]) for read in (StoreReader(root).read, partial(load_bare, root))
                ]
                assert found[0] == found[1] != "wrong", f"{path}: bit {bit} of byte {place} of {key}: {found}"
                assert found[0] != "format" or place < 12, f"{path}: bit {bit} of byte {place} of {key}: {found}"
                outcomes[found[0]] += 1
        (root / key).write_bytes(data)
    assert outcomes["corruption"] > 50 * max(1, outcomes["sound"])


def outcome(read: Callable[[str], bytes], path: str, content: bytes) -> str:
    try:
        return "sound" if read(path) == content else "wrong"
    except (ReaderError, TierfsError) as error:
        return error.kind


# -- a store with every kind of object ---------------------------------------------------------------------------------


def put(root: Path, key: str, kind: int, word: int, body: bytes, *, blocks: bytes = b"") -> None:
    data = struct.pack("<8sHHI", b"\x89TIERFS\n", 1, kind, word) + body
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    (root / key).write_bytes(data + xxhash.xxh3_128_digest(data) + blocks)


def chunk(root: Path, raw: bytes) -> bytes:
    """Put a chunk of one STORE block. Return its row."""
    block = xxhash.xxh3_128_digest(raw)
    digest = xxhash.xxh3_128_digest(struct.pack("<Q", len(raw)) + block)
    body = struct.pack("<BxHHxxII8x16s16sB3xI", 1, 1, 0, len(raw), MIB, digest, block, 0, len(raw))
    put(root, f".tierfs/chunks/{digest.hex()[:2]}/{digest.hex()}.0", 1, 96, body, blocks=raw)
    return struct.pack("<16sIII8xHxx", digest, len(raw), 96 + len(raw), 0, 0)


def manifest(root: Path, path: str, flags: int, length: int, digest: bytes, row_count: int, rest: bytes) -> None:
    check, inline = xxhash.xxh3_128_digest(path.encode()), length if flags & INLINE else 0
    fixed = struct.pack("<16s16sQqqBBHIII16s", b"w" * 16, check, length, 1, 2, 1, 0, 0, 0, inline, row_count, digest)
    put(root, f".tierfs/tree/{path}!", 2, flags, fixed + rest)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store with every kind of object, which no process has open."""
    root = tmp_path_factory.mktemp("small")
    fs = open_store(root)
    with fs.open(f"{root}/short", "wb", metadata={"step": 7}) as file:
        file.write(b"in its manifest")
    fs.pipe_file(f"{root}/noise", content(70 * KIB, 0, noisy=True))
    fs.pipe_file(f"{root}/text", content(MIB + 70 * KIB, 0, noisy=False))
    fs.pipe_file(f"{root}/a/gone", b"")
    fs.mv(f"{root}/a/gone", f"{root}/a/empty")
    fs.makedirs(f"{root}/directory")
    at_rest = tmp_path_factory.mktemp("at rest") / "store"
    shutil.copytree(root, at_rest, ignore=shutil.ignore_patterns("tmp"))
    parts = [content(size, 99, noisy=True) for size in (900, 1, 500)]
    rows = [chunk(at_rest, part) for part in parts]
    tables = chunk(at_rest, b"".join(rows)[:50]) + chunk(at_rest, b"".join(rows)[50:])
    digest = xxhash.xxh3_128_digest(struct.pack("<Q", 1401) + b"".join(row[:16] for row in rows))
    manifest(at_rest, "indirect", INDIRECT, 1401, digest, 2, tables)
    name = tables[:16] + struct.pack("<I8x", 0)
    put(at_rest, ".tierfs/gc/0000000000000003", 6, 0, struct.pack("<QqB3xI", 3, 4, 1, 2) + b"\0" * 28 + name)
    return at_rest


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy"))


def snapshot(root: Path) -> object:
    """Return everything that a reader can learn from a store."""
    reader = StoreReader(root)
    files = {path: (reader.read(path), reader.chunk_names(path)) for path in reader.files()}
    return reader.descriptor, reader.records(), files, reader.leases(), reader.condemned()


def attempt(root: Path) -> object:
    try:
        return snapshot(root)
    except ReaderError as error:
        return error


def objects(root: Path) -> list[Path]:
    return sorted(path for path in (root / ".tierfs").rglob("*") if path.is_file())


def test_store_has_every_kind_of_object_and_is_read(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {path.read_bytes()[10] for path in objects(store) if path.name != "store.json"}
    assert kinds == {1, 2, 3, 4, 6, 7}
    reader = StoreReader(store)
    assert reader.read("indirect") == b"".join(content(size, 99, noisy=True) for size in (900, 1, 500))
    assert len(reader.chunk_names("indirect")) == 5
    assert [item.epoch for item in reader.condemned()] == [3]
    assert main([str(store)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == reader.files()


def test_package_reads_an_indirect_manifest_made_by_hand(copy: Path) -> None:
    assert open_store(copy).cat_file(f"{copy}/indirect") == StoreReader(copy).read("indirect")


# -- damage ------------------------------------------------------------------------------------------------------------


def test_flipped_bits_are_found_or_cannot_matter(copy: Path) -> None:
    before, keys, draw, found = snapshot(copy), objects(copy), random.Random(20), 0
    for _ in range(200):
        path = draw.choice(keys)
        data = path.read_bytes()
        place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        outcome = attempt(copy)
        if isinstance(outcome, ReaderError):
            found += 1
            in_version_or_kind = path.name == "store.json" or 8 <= place < 12
            assert outcome.kind == "corruption" or in_version_or_kind, f"{path}: bit {bit} of byte {place}: {outcome}"
        else:
            assert outcome == before, f"{path}: bit {bit} of byte {place}"
        path.write_bytes(data)
    assert found >= 195


def test_objects_of_another_length_are_found(copy: Path) -> None:
    before = snapshot(copy)
    for path in objects(copy):
        data = path.read_bytes()
        size = len(data)
        lengths = {0, 1, 8, 15, 16, 31, 32, 79, 80, 96, size // 3, size // 2, size - 17, size - 16, size - 1}
        others = [data[:length] for length in sorted(lengths) if 0 <= length < size] + [data + b"\0", data + data]
        for other in others:
            path.write_bytes(other)
            if path.name == "store.json" and other.strip() == data.strip():
                assert snapshot(copy) == before
                continue
            with pytest.raises(ReaderError) as caught:
                snapshot(copy)
            assert caught.value.kind == "corruption", f"{path.name} with {len(other)} of {size} bytes: {caught.value}"
        path.write_bytes(data)


def test_missing_chunks_and_swapped_objects_are_found(copy: Path) -> None:
    tree, chunks = copy / ".tierfs/tree", [path for path in objects(copy) if path.parent.parent.name == "chunks"]
    for one, other in ((tree / "noise!", tree / "text!"), (tree / "a/gone!", tree / "short!"), tuple(chunks[:2])):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        with pytest.raises(ReaderError, match="corruption"):
            snapshot(copy)
        one.write_bytes(first)
        other.write_bytes(second)
    for path in chunks:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(ReaderError, match="corruption"):
            snapshot(copy)
        path.write_bytes(data)
    assert isinstance(StoreReader(copy).record("short"), Manifest)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 2), (10, 5), (10, 99), (12, 3), (12, 4), (48, 14), (72, 9), (75, 2), (78, 2), (82, 2), (84, 1), (87, 255)],
)
def test_fields_over_their_limits_are_refused_though_the_checksum_fits(copy: Path, offset: int, value: int) -> None:
    path = copy / ".tierfs/tree/short!"
    data = bytearray(path.read_bytes()[:-16])
    data[offset] = value
    path.write_bytes(bytes(data) + xxhash.xxh3_128_digest(bytes(data)))
    with pytest.raises(ReaderError, match="format"):
        StoreReader(copy).read("short")
