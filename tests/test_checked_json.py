"""Whatever a store, a peer or a server sends as JSON is a value within bounds, or one of tierfs's errors."""

import ast
import contextlib
import json
from pathlib import Path

import pytest
from support.rubbish import TEXTS, VALUES, outcomes

import tierfs
from tierfs import digest
from tierfs.checked_json import DEPTH_MAX, DIGITS_MAX, parse_object, parse_value
from tierfs.codec.layout.safetensors import follow_safetensors
from tierfs.digest import DigestKind
from tierfs.errors import FormatError, InvalidInputError
from tierfs.format.checkpoint import SaveMark, named_files
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.format.header import Kind, seal
from tierfs.format.manifest import Manifest, Tombstone, decode_record, inline_digest
from tierfs.format.upkeep import Collector, EpochState, PrefixState, ScrubRecord
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.host.rpc import protocol

PACKAGE = Path(tierfs.__file__).parent
BESIDE = {
    "checked_json.py": "the reader itself",
    "dcp/columns.py": "numbers and names that a pattern has matched",
    "dcp/document.py": "a document with the right checksum, at five times the speed",
    "demo/story.py": "events of the demo's own processes",
    "mount/mounting.py": "the answer of a process that this one started",
    "mount/process.py": "the line of the process that started this one",
    "session/tiers.py": "a copy of this process's own value",
    "train/values.py": "values of any depth and size come back exactly",
    "ui/server.py": "a copy of this process's own value",
}


def test_no_other_module_parses_json_of_others():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        if any(ast.unparse(call) in {"json.loads", "json.load", "json.JSONDecoder"} for call in calls):
            found.add(str(path.relative_to(PACKAGE)))
    assert found == set(BESIDE)


@pytest.mark.parametrize("name", ["deep", "deeper", "400-digits", "5000-digits", "Infinity", "NaN", "1e999"])
def test_a_value_over_a_bound_is_refused(name):
    with pytest.raises(FormatError, match="a note is not JSON"):
        parse_object(b'{"a": [' + VALUES[name] + b"]}", "a note")


@pytest.mark.parametrize("name", ["empty", "cut", "two", "not-utf-8", "byte-order-mark", "deeper"])
def test_data_that_is_no_json_is_refused(name):
    with pytest.raises(FormatError, match="a note is not JSON"):
        parse_value(TEXTS[name], "a note")


def test_values_at_the_bounds_are_taken():
    deep = b"[" * DEPTH_MAX + b"]" * DEPTH_MAX
    assert json.dumps(parse_value(deep, "a note")).encode() == deep
    assert float(parse_value("9" * DIGITS_MAX, "a note")) == pytest.approx(1e300)
    assert parse_value(f'["{"9" * 1000}", 1e300]', "a note") == ["9" * 1000, 1e300]
    assert parse_value("[Infinity, 1e999]", "a note", numbers="any") == [float("inf")] * 2


def test_other_values_can_be_refused():
    for text, options in (("1.0", {"numbers": "integers"}), ('{"a": 1, "a": 2}', {"unique": True})):
        assert parse_value(text, "a note")
        with pytest.raises(FormatError):
            parse_value(text, "a note", **options)
    with pytest.raises(FormatError, match="not a JSON object, but list"):
        parse_object("[]", "a note")
    with pytest.raises(FormatError):
        parse_object(5, "a note")


@pytest.mark.parametrize("value", [10**400, float("nan"), "deep"])
def test_metadata_that_no_reader_takes_is_not_written(value):
    for _ in range(DEPTH_MAX + 1 if value == "deep" else 0):
        value = [value]
    with pytest.raises(InvalidInputError, match="metadata of 'a' is not JSON"):
        manifest({"value": value}).encode("a")


def manifest(metadata):
    kind = DigestKind.XXH3_128
    return Manifest(Kind.FILE, bytes(16), 0, 0, 0, kind, inline_digest(kind, b""), inline=b"", metadata=metadata)


DESCRIPTOR = Descriptor("0" * 32, 1, DigestKind.XXH3_128, Capabilities(True, True, True, True, ("md5",)))
COLLECTOR = Collector(epochs={1: EpochState(5)}, last={"records": 1}, unnamed={"ab": 5})
SCRUB = ScrubRecord({"00": PrefixState(5, "key")}, {"key": "damaged"}, {"missing": 1})
DRAFT = Draft("run/a", Tombstone(bytes(16), 0), ObservedBase("7", bytes(16)), boot="boot")


def document_of(data):
    """Return the JSON object in some bytes, where it begins, and where it ends."""
    begin = data.index(b'{"')
    document, length = json.JSONDecoder().raw_decode(data[begin:].decode(errors="replace"))
    return document, begin, begin + length


def resealed(data, text, length_bytes=4):
    """Return a sealed record with another JSON text, whose length is right before it."""
    _, begin, _ = document_of(data)
    return seal(data[: begin - length_bytes] + len(text).to_bytes(length_bytes, "little") + text)


def descriptor(text):
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        document = json.loads(text)
        document.pop("checksum", None)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        text = json.dumps({**document, "checksum": digest.checksum(canonical).hex()}).encode()
    Descriptor.decode(text, "store.json")


def metadata(text):
    data = manifest({"n": 1}).encode("a")
    at = data.index(b'{"n":1}')
    # The length of the metadata lies 12 bytes before the digest, and "previous" is empty.
    head = bytearray(data[:at])
    head[at - 16 - 12 : at - 16 - 8] = len(text).to_bytes(4, "little")
    record = decode_record(seal(bytes(head) + text), "a", "a")
    SaveMark.of(record.metadata)


def collector(text):
    record = Collector.decode(resealed(COLLECTOR.encode(), text), "gc")
    assert sum(record.unnamed.values()) + record.last.get("records", 0) < 1e300


def scrub(text):
    record = ScrubRecord.decode(resealed(SCRUB.encode(), text), "scrub")
    assert record.last.get("missing", 0) < 1e300


def draft(text):
    data = DRAFT.encode()
    _, begin, end = document_of(data)
    head = bytearray(data[:begin])
    head[12:16] = len(text).to_bytes(4, "little")
    whole = bytes(head) + text + data[end:-16]
    Draft.decode(whole + digest.checksum(whole), "a draft")


def safetensors(text):
    steps = follow_safetensors(len(text).to_bytes(8, "little") + text[:1])
    try:
        next(steps)
        steps.send(text[1:])
    except StopIteration:
        pass


DOORS = {
    "descriptor": (descriptor, json.loads(DESCRIPTOR.encode())),
    "metadata": (metadata, {"tierfs.save": {"sequence": 5, "save_id": "ab", "replaces": [[1, "ab"]]}}),
    "collector": (collector, document_of(COLLECTOR.encode())[0]),
    "scrub": (scrub, document_of(SCRUB.encode())[0]),
    "draft": (draft, document_of(DRAFT.encode())[0]),
    "message": (protocol.decode, {"do": "wait", "arguments": {"path": "a"}}),
    "files": (lambda text: named_files(text, "a"), {"files": {"a": 1}}),
    "safetensors": (safetensors, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
}


@pytest.mark.parametrize("door", DOORS)
def test_rubbish_is_a_value_or_an_error_of_tierfs(door):
    decode, document = DOORS[door]
    decode(json.dumps(document).encode())
    for name, message in outcomes(decode, document):
        assert len(message) < 1000, name
