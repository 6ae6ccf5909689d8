"""Every later version reads the files of version 1, and rejects damaged ones as FORMAT.md says."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.independent_reader import ReaderError, StoreReader

from tierfs.codec import Codec
from tierfs.errors import TierfsError
from tierfs.format.keys import chunk_key, parse_record_key, references_key
from tierfs.format.upkeep import Collector, EpochState, PrefixState, ReferenceList, ScrubRecord
from tierfs.objects import LocalObjects
from tierfs.store import Store, find, load, verify
from tierfs.store.create import read_descriptor
from tierfs.store.read.lookup import read_envelope
from tierfs.store.tree.records import observe

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
CASES = json.loads((GOLDEN / "damaged" / "cases.json").read_text())
FORMAT = Path(__file__).parents[2] / "docs" / "reference" / "FORMAT.md"


def open_at(root):
    objects = LocalObjects(root)
    return Store(objects, read_descriptor(objects, "golden"), url="golden")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the golden store, which each test leaves as it was."""
    root = tmp_path_factory.mktemp("golden") / "store"
    shutil.copytree(GOLDEN / "store", root)
    return root


def test_every_golden_file_reads_as_it_was_written():
    store = open_at(GOLDEN / "store")
    for path, digest in EXPECTED["files"].items():
        assert hashlib.sha256(load(store, path)).hexdigest() == digest, path


def test_the_golden_store_lists_its_files_and_directories():
    entries = find(open_at(GOLDEN / "store"), "")
    assert {entry.path for entry in entries if not entry.is_directory} == set(EXPECTED["files"])
    assert set(EXPECTED["directories"]) <= {entry.path for entry in entries if entry.is_directory}


def test_the_golden_store_verifies(copied):
    assert verify(open_at(copied)).damage == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_both_readers_refuse_a_damaged_object_and_verify_names_it(case, copied):
    replaced = {**case.get("others", {}), case["key"]: case["file"]}
    store = open_at(copied)
    try:
        for key, file in replaced.items():
            (copied / key).parent.mkdir(exist_ok=True)
            shutil.copy(GOLDEN / "damaged" / file, copied / key)
        with pytest.raises(TierfsError) as raised:
            load(store, case["path"])
        assert raised.value.kind == case["error"]
        with pytest.raises(ReaderError) as refused:
            StoreReader(copied).read(case["path"])
        assert refused.value.kind == case["error"]
        assert {damage.key for damage in verify(store).damage} == {case["key"]}
    finally:
        for key in replaced:
            (copied / key).unlink()
            if (GOLDEN / "store" / key).exists():
                shutil.copy(GOLDEN / "store" / key, copied / key)


def test_the_golden_files_have_every_codec_at_every_width():
    store = open_at(GOLDEN / "store")
    codecs = Counter()
    for path in EXPECTED["files"]:
        for row in observe(store, path).manifest.rows:
            codecs.update(Codec(block.codec).name for block in read_envelope(store, row, path).blocks)
    assert set(codecs) == set(Codec.__members__)
    assert min(codecs[name] for name in ("CONST", "PLANE", "DPLANE", "SPARSE")) >= len((1, 2, 4, 8))
    (working,) = observe(store, "step-2/working.bin").manifest.rows
    assert [len(base.name.recipe.strip(b"\0")) > 0 for base in read_envelope(store, working, "").bases] == [True, False]
    assert len(working.bases) == 4


def dump(data: bytes) -> str:
    """Return a hex dump in FORMAT.md's layout."""
    lines = []
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{at:04x}  {piece.hex(' '):47}  {text}".rstrip())
    return "\n".join(lines)


def test_the_example_in_the_specification_is_the_golden_file():
    tree = GOLDEN / "store" / ".tierfs" / "tree"
    record = (tree / "a" / "hello.txt!").read_bytes()
    store = open_at(GOLDEN / "store")
    manifest = observe(store, "numbers.bin").manifest
    chunk = (GOLDEN / "store" / chunk_key(manifest.rows[0].name)).read_bytes()
    envelope = chunk[: int.from_bytes(chunk[12:16], "little")]
    text = FORMAT.read_text()
    for name, data in {"record": record, "envelope": envelope}.items():
        assert f"<!-- example:{name} -->\n```\n{dump(data)}\n```" in text
    assert parse_record_key(".tierfs/tree/a/hello.txt!") == "a/hello.txt"


def test_the_golden_collector_record_reads_as_it_was_written():
    data = (GOLDEN / "store" / ".tierfs" / "gc" / "collector").read_bytes()
    record = Collector.decode(data, "collector")
    assert (record.holder, record.fence, record.sequence, record.duration_s) == (bytes(range(16)), 1_700_000_001, 3, 60)
    assert record.epochs[2] == EpochState(1_700_000_000_000_000_000, 1_700_003_700_000_000_000)
    assert record.encode() == data
    theirs = StoreReader(GOLDEN / "store").collector()
    assert (theirs["fence"], theirs["epochs"]["0000000000000001"]["swept_ns"]) == (1_700_000_001, None)


def test_the_golden_record_of_scrubbing_reads_as_it_was_written():
    data = (GOLDEN / "store" / ".tierfs" / "scrub" / "record").read_bytes()
    record = ScrubRecord.decode(data, "scrub record")
    assert record.prefixes["ff"] == PrefixState(1_700_000_100_000_000_000, "")
    assert record.damaged == {".tierfs/chunks/05/05000000000000000000000000000000.0": "checksum mismatch"}
    assert record.encode() == data
    theirs = StoreReader(GOLDEN / "store").scrub()
    assert (theirs["prefixes"]["04"]["after"], theirs["last"]) == (record.prefixes["04"].after, {"chunks": 2})


def test_the_golden_reference_list_reads_as_it_was_written():
    data = (GOLDEN / "store" / references_key("run/step_1")).read_bytes()
    found = ReferenceList.decode(data, "reference list")
    assert found.path == "run/step_1"
    assert (len(found.records), len(found.names)) == (2 * 16, 2 * 28)
    assert found.encode() == data
    checks, names = StoreReader(GOLDEN / "store").references("run/step_1")
    assert (b"".join(checks), b"".join(names)) == (found.records, found.names)
    assert names[0][:16].hex() == "04cec85e9cdd2ca1e866465b043aff51"
