"""Shard files that are written from front to back."""

import json

import pytest

torch = pytest.importorskip("torch")

from tierfs.dcp.save.shard_writer import stream
from tierfs.store.read.reader import load


def header_of(store, path):
    content = load(store, path)
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_equal_names_get_numbers_that_are_free(store):
    names = ["a#2", "a", "a"]
    items = [(name, torch.full((4,), number, dtype=torch.uint8)) for number, name in enumerate(names)]
    stream(store, "x.safetensors", items)
    header, data = header_of(store, "x.safetensors")
    del header["__metadata__"]
    assert len(header) == len(names)
    assert header.keys() >= set(names)
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans == [[at, at + 4] for at in range(0, len(data), 4)]
