"""An object with one flipped bit is corrected, whichever bit it is. An object with more damage is not."""

import json
import random
from pathlib import Path

import pytest

from tierfs.format.correction import CORRECTED_BYTES_MAX, correct_descriptor, correct_envelope, correct_sealed
from tierfs.format.header import Kind, header, seal

STORE = Path(__file__).parents[1] / "golden" / "v1" / "store" / ".tierfs"
CHUNK = (STORE / "chunks" / "04" / "04cec85e9cdd2ca1e866465b043aff51.0").read_bytes()
ENVELOPE = CHUNK[: int.from_bytes(CHUNK[12:16], "little")]
SEALED = {
    "record": (STORE / "tree" / "a" / "hello.txt!").read_bytes(),
    "collector": (STORE / "gc" / "collector").read_bytes(),
}


def flipped(data, bit):
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


@pytest.mark.parametrize("name", SEALED)
def test_any_bit_of_a_sealed_object_is_corrected(name):
    data = SEALED[name]
    for bit in random.Random(name).sample(range(8 * len(data)), 40):
        assert correct_sealed(flipped(data, bit)) == data


def test_any_bit_of_an_envelope_is_corrected_the_length_too():
    for bit in {*range(8 * 16), *random.Random(1).sample(range(8 * len(ENVELOPE)), 40)}:
        assert correct_envelope(flipped(CHUNK, bit)) == ENVELOPE


def test_correction_ignores_bytes_behind_an_envelope():
    assert correct_envelope(flipped(CHUNK, 8 * len(ENVELOPE) + 5)) == ENVELOPE


def test_a_descriptor_is_corrected():
    data = (STORE / "store.json").read_bytes()
    for bit in (0, 8 * 20 + 3, 8 * (len(data) // 2), 8 * len(data) - 1):
        found = correct_descriptor(flipped(data, bit), "store.json")
        assert json.loads(found) == json.loads(data)


@pytest.mark.parametrize("data", [flipped(flipped(SEALED["record"], 100), 200), SEALED["record"][:-1], b"", bytes(40)])
def test_more_damage_than_a_bit_is_not_corrected(data):
    assert correct_sealed(data) is None
    assert correct_envelope(data) is None


def test_correction_skips_long_objects():
    data = seal(header(Kind.COLLECTOR, 0) + bytes(CORRECTED_BYTES_MAX))
    assert correct_sealed(flipped(data, 100)) is None
