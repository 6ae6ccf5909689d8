"""Checksums match the descriptions of their algorithms, however the bytes are split."""

from __future__ import annotations

import itertools
import uuid
from random import Random

import pytest

from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError, StoreError
from tierfs.format.descriptor import Capabilities
from tierfs.objects import CREATE, Checksum, MemoryObjects, RetryingObjects, Update
from tierfs.objects.checksums import (
    ALGORITHMS,
    checksum_for,
    computable,
    compute,
    put_checked,
    put_idempotent,
    verify_checksum,
)
from tierfs.testing import Fault, FaultyObjects, PlannedFault

CHECK = b"123456789"
KNOWN = {
    # The CRCs' values are the check values in the catalogue of CRC algorithms: CRC-64/NVME, CRC-32/ISCSI.
    "crc64nvme": "ae8b14860a799888",
    "crc32c": "e3069283",
    "sha256": "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
    "md5": "25f9e794323b453885f5181f1b624d0b",
    "xxh3-128": "33119477ede5dcd5e9716427681d5860",
}
EMPTY = {
    "crc64nvme": "0000000000000000",
    "crc32c": "00000000",
    "md5": "d41d8cd98f00b204e9800998ecf8427e",
    "xxh3-128": "99aa06d3014798d86001c324468d497f",
    "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}
"""The checksums of zero bytes."""

by_algorithm = pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))


def _needs(algorithm: str) -> None:
    pytest.importorskip(ALGORITHMS[algorithm][0], reason=f"what computes {algorithm} is not installed")


@by_algorithm
def test_known_bytes_have_the_known_checksum(algorithm: str) -> None:
    _needs(algorithm)
    assert compute(algorithm, [CHECK]) == Checksum(algorithm, bytes.fromhex(KNOWN[algorithm]))
    assert compute(algorithm, []) == Checksum(algorithm, bytes.fromhex(EMPTY[algorithm]))


@by_algorithm
def test_the_checksum_does_not_depend_on_how_the_bytes_are_split(algorithm: str) -> None:
    _needs(algorithm)
    random = Random(5)
    whole = random.randbytes(3_000_000)
    known = compute(algorithm, [whole])
    for kind in (bytes, bytearray, memoryview):
        for _ in range(5):
            cuts = sorted(random.choices(range(len(whole)), k=random.randrange(8)))
            pieces = [kind(whole[start:end]) for start, end in itertools.pairwise([0, *cuts, len(whole)])]
            assert compute(algorithm, pieces) == known, [len(piece) for piece in pieces]


@by_algorithm
def test_every_bit_counts(algorithm: str) -> None:
    _needs(algorithm)
    flipped = {compute(algorithm, [bytes([CHECK[0] ^ 1 << bit]) + CHECK[1:]]).value for bit in range(8)}
    assert len(flipped | {compute(algorithm, [CHECK]).value}) == 9


def test_a_checksum_without_its_package_is_not_computable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "crc1", ("a_package_that_nobody_has", lambda _: b"0"))
    assert not computable("crc1")
    for unknown in ("crc1", "sum-of-digits"):
        with pytest.raises(InvalidInputError, match=f"{unknown} checksums cannot be computed here"):
            compute(unknown, [CHECK])


def test_the_first_is_sent_that_both_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "crc1", ("a_package_that_nobody_has", lambda _: b"0"))

    def chosen(*names: str) -> str | None:
        endpoint = Capabilities(
            conditional_create=True, conditional_update=True, list_after_write=True, atomic_put=True, checksums=names
        )
        checksum = checksum_for(endpoint, [CHECK])
        assert checksum is None or checksum.value.hex() == KNOWN[checksum.algorithm]
        return checksum and checksum.algorithm

    assert chosen("sha256", "md5") == "sha256"
    assert chosen("md5", "sha256") == "md5"
    assert chosen("crc1", "of-the-future", "md5") == "md5"
    assert chosen("crc1") is None
    assert chosen() is None


def test_a_backend_that_verifies_itself_refuses_other_bytes_and_other_algorithms() -> None:
    verify_checksum(None, [CHECK], "a")
    verify_checksum(compute("xxh3-128", [CHECK]), [CHECK[:4], CHECK[4:]], "a")
    with pytest.raises(StoreError, match="a: the bytes") as caught:
        verify_checksum(compute("xxh3-128", [CHECK]), [CHECK, b"!"], "a")
    assert caught.value.transient  # the sender has the right bytes
    with pytest.raises(InvalidInputError):
        verify_checksum(compute("md5", [CHECK]), [CHECK], "a")


@pytest.fixture
def memory() -> MemoryObjects:
    return MemoryObjects(f"/checksums-{uuid.uuid4().hex}")


def test_a_put_carries_the_checksum_that_the_endpoint_verifies(memory: MemoryObjects, monkeypatch) -> None:
    sent = []
    monkeypatch.setattr(memory, "put", lambda *_, checksum, **__: sent.append(checksum))
    put_checked(memory, "a", [CHECK])
    assert sent == [checksum_for(memory.capabilities, [CHECK])]
    assert sent[0] is not None


def test_a_put_whose_answer_was_lost_is_done(memory: MemoryObjects) -> None:
    lost = PlannedFault(Fault.LOST_RESPONSE, "put")
    objects = RetryingObjects(FaultyObjects(memory, [lost]), delay_s=0)
    first = put_idempotent(objects, "a", CHECK, mode=CREATE)
    assert first == memory.head("a")
    objects = RetryingObjects(FaultyObjects(memory, [lost]), delay_s=0)
    assert put_idempotent(objects, "a", b"other", mode=Update(first.version)) == memory.head("a")


@pytest.mark.parametrize("standing", [b"other", b"much longer than it", None])
def test_a_put_that_another_was_faster_than_is_refused(memory: MemoryObjects, standing) -> None:
    version = memory.put("a", [b"first"]).version
    memory.delete(["a"])
    if standing is not None:
        memory.put("a", [standing])
        with pytest.raises(AlreadyExistsError):
            put_idempotent(memory, "a", CHECK, mode=CREATE)
    with pytest.raises(ConflictError):
        put_idempotent(memory, "a", CHECK, mode=Update(version))
