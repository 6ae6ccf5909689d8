"""Write the golden files of format version 1: a small store, and damaged copies of single objects of it.

Run once, by the version that the files are named after: ``python tests/golden/write_v1.py``. Afterwards the files are
only read. Every clock and every random byte is fixed.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned
from tierfs.format.manifest import Manifest, Row
from tierfs.objects import LocalObjects
from tierfs.store import WriteMode, Writer, copy, delete, make_directory, save
from tierfs.store.create import create_store
from tierfs.store.store import Store
from tierfs.store.tree.records import observe

HERE = Path(__file__).parent / "v1"
SEED = 1


def contents() -> dict[str, bytes]:
    """Return path and content of every file in the golden store."""
    noise = random.Random(SEED)
    numbers = struct.pack("<16640I", *range(16640))
    return {
        "a/hello.txt": b"hello, tierfs\n",
        "empty": b"",
        "numbers.bin": numbers,
        "noise.bin": noise.randbytes((1 << 20) + 12345),
        "zeros-20MiB.bin": bytes(20 << 20),
        "indirect.bin": numbers + b"tail",
        "copy-of-numbers.bin": numbers,
        "appended.txt": b"first, second",
        "odd names/ü & 100%! [x].txt": b"odd\n",
        "second-generation.bin": numbers[::-1],
    }


def write_store(root: Path) -> None:
    noise = random.Random(SEED)
    clock = ManualClock()
    objects = LocalObjects(root)
    descriptor, _ = create_store(objects, "golden", random_bytes=noise.randbytes(16), clock=clock)
    store = Store(objects, descriptor, url="golden", clock=clock, random_bytes=noise.randbytes)
    files = contents()
    for path in ("a/hello.txt", "empty", "numbers.bin", "noise.bin", "zeros-20MiB.bin", "odd names/ü & 100%! [x].txt"):
        clock.sleep(1)
        save(
            store, path, files[path], metadata={"step": 7, "tags": ["golden", None]} if path == "numbers.bin" else None
        )
    preconditions: Any = importlib.import_module("tierfs.store.write.preconditions")
    direct = preconditions.DIRECT_ROW_BYTES_MAX
    preconditions.DIRECT_ROW_BYTES_MAX = 0
    save(store, "indirect.bin", files["indirect.bin"])
    preconditions.DIRECT_ROW_BYTES_MAX = direct
    copy(store, "numbers.bin", "copy-of-numbers.bin")
    save(store, "appended.txt", b"first, ")
    writer = Writer(store, "appended.txt", mode=WriteMode.APPEND)
    writer.write(b"second")
    writer.commit()
    save(store, "deleted.bin", files["numbers.bin"])
    delete(store, "deleted.bin")
    make_directory(store, "empty directory")
    save(store, "condemned-then-saved-again.bin", files["second-generation.bin"])
    row = rows_of(store, "condemned-then-saved-again.bin")[0]
    delete(store, "condemned-then-saved-again.bin")
    condemned = Condemned(1, clock.now_ns(), DigestKind.XXH3_128, frozenset({row.name}))
    objects.put(keys.condemned_key(1), [condemned.encode()])
    clock.sleep(40)  # past half the lease, so the list is read with its renewal
    save(store, "second-generation.bin", files["second-generation.bin"])
    assert rows_of(store, "second-generation.bin")[0].name == ChunkName(row.name.digest, 1)
    shutil.rmtree(root / ".tierfs" / "tmp")


def rows_of(store: Store, path: str) -> tuple[Row, ...]:
    manifest = observe(store, path).manifest
    assert isinstance(manifest, Manifest)
    return manifest.rows


def write_damage(root: Path, target: Path) -> None:
    """Write damaged copies of single objects, and the errors that reading them must raise."""
    hello = keys.record_key("a/hello.txt")
    numbers = keys.record_key("numbers.bin")
    chunk = chunk_of(root, "numbers.bin")
    stored = chunk_of(root, "noise.bin")
    count = itertools.count(1)
    cases: list[dict[str, str]] = []

    def case(name: str, key: str, path: str, error: str, data: bytes) -> None:
        file = f"{next(count):02d}-{name}.bin"
        (target / file).write_bytes(data)
        cases.append({"file": file, "key": key, "path": path, "error": error})

    def original(key: str) -> bytes:
        return (root / key).read_bytes()

    def patched(key: str, offset: int, new: bytes) -> bytes:
        data = bytearray(original(key))
        data[offset : offset + len(new)] = new
        return bytes(data)

    case("record-flipped-bit", hello, "a/hello.txt", "corruption", patched(hello, 100, b"\xff"))
    case("record-cut-short", hello, "a/hello.txt", "corruption", original(hello)[:-1])
    case("record-empty", hello, "a/hello.txt", "corruption", b"")
    case("record-of-another-path", hello, "a/hello.txt", "corruption", original(numbers))
    case("record-no-magic", hello, "a/hello.txt", "corruption", patched(hello, 0, b"X"))
    case("record-version-2", hello, "a/hello.txt", "format", patched(hello, 8, b"\x02"))
    case("record-unknown-kind", hello, "a/hello.txt", "format", patched(hello, 10, b"\x63"))
    case("record-is-a-chunk", hello, "a/hello.txt", "corruption", original(chunk))
    case("record-row-count-huge", numbers, "numbers.bin", "format", resealed(patched(numbers, 84, b"\xff\xff\xff\xff")))
    case("record-length-huge", numbers, "numbers.bin", "format", resealed(patched(numbers, 48, b"\xff" * 8)))
    case("record-unknown-flag", numbers, "numbers.bin", "format", resealed(patched(numbers, 12, b"\x80")))
    case("record-unknown-digest", numbers, "numbers.bin", "format", resealed(patched(numbers, 72, b"\x09")))
    case("chunk-flipped-bit-in-block", chunk, "numbers.bin", "corruption", patched(chunk, 2000, b"\xa5\x5a"))
    case("chunk-flipped-bit-in-envelope", chunk, "numbers.bin", "corruption", patched(chunk, 45, b"\x00\xff"))
    case("chunk-cut-short", chunk, "numbers.bin", "corruption", original(chunk)[:-7])
    case("chunk-added-to", chunk, "numbers.bin", "corruption", original(chunk) + b"x")
    case("chunk-of-another-digest", chunk, "numbers.bin", "corruption", original(stored))
    case("chunk-version-2", chunk, "numbers.bin", "format", patched(chunk, 8, b"\x02"))
    envelope = int.from_bytes(original(chunk)[12:16], "little")
    unknown = bytearray(original(chunk))
    unknown[40 + 16 + 16] = 77
    case(
        "chunk-unknown-codec",
        chunk,
        "numbers.bin",
        "format",
        resealed(bytes(unknown[:envelope])) + bytes(unknown[envelope:]),
    )
    # The frame's header claims 4 GiB. A reader must not allocate memory for that.
    body = bytearray(original(chunk)[envelope:])
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (1 << 32).to_bytes(8, "little") + bytes(body[13:])
    case("chunk-bomb", chunk, "numbers.bin", "corruption", original(chunk)[:envelope] + bomb[: len(body)])
    case("stored-block-flipped-bit", stored, "noise.bin", "corruption", patched(stored, 1_000_000, b"\x00\x01\x02"))
    (target / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


def resealed(data: bytes) -> bytes:
    """Return the data with a valid checksum at its end."""
    import xxhash

    return data[:-16] + xxhash.xxh3_128_digest(data[:-16])


def chunk_of(root: Path, path: str) -> str:
    """Return the key of the first chunk of a file in the golden store."""
    objects = LocalObjects(root)
    from tierfs.store.create import read_descriptor

    store = Store(objects, read_descriptor(objects, "golden"), url="golden")
    return keys.chunk_key(rows_of(store, path)[0].name)


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "damaged").mkdir(parents=True)
    write_store(HERE / "store")
    write_damage(HERE / "store", HERE / "damaged")
    expected = {path: hashlib.sha256(data).hexdigest() for path, data in contents().items()}
    listing = {
        "files": expected,
        "directories": ["empty directory"],
        "tombstones": ["condemned-then-saved-again.bin", "deleted.bin"],
    }
    (HERE / "expected.json").write_text(json.dumps(listing, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
