"""The encoder tries out a tensor's codec once, remembers the result, and tries nothing while the host is busy."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.saving import XXH3, Training, bfloat16

from tierfs import digest
from tierfs.buffers import Buffers, buffers
from tierfs.clock import ManualClock
from tierfs.codec import Codec, Reason, decode_block
from tierfs.codec.choice import DELTA_WORTH
from tierfs.errors import CorruptionError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.encode import encoder as encoder_module
from tierfs.store.encode.encoder import REPROBE_SAVES, Encoder
from tierfs.store.encode.pipeline import Codecs, SourcePiece, blocks_of
from tierfs.store.encode.tensors import ChunkContext, Tensor

MIB = 1 << 20
MASTER = Tensor("run:master:float4", "float", 4)


class Host:
    """The chunks that an encoder can read: on this host, and in the object tier."""

    def __init__(self):
        self.local, self.remote = {}, {}
        self.reads = self.fetches = 0

    def chunk(self, raw, place):
        name = digest.combine(XXH3, len(raw), [digest.hash_bytes(XXH3, block) for block in blocks_of(memoryview(raw))])
        place[name] = bytes(raw)
        return Row(ChunkName(name), len(raw), len(raw) // 2)

    def read_source(self, row, out):
        self.reads += 1
        raw = self.local.get(row.name.digest, b"")
        if digest.digests_of(XXH3, raw)[1] != row.name.digest:
            return False
        out[:] = raw
        return True

    def read_base(self, row, out):
        return self.read_source(row, out)

    def fetch(self, row, out):
        self.fetches += 1
        if row.name.digest not in self.remote:
            raise CorruptionError("it is gone")
        out[:] = self.remote[row.name.digest]


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def tried(monkeypatch):
    """The trials so far, in order: whether each one had a base."""
    found, choose = [], encoder_module.choose

    def counted(sample, **about):
        found.append(about["base"] is not None)
        return choose(sample, **about)

    monkeypatch.setattr(encoder_module, "choose", counted)
    return found


def encoder_for(codecs="all", *, is_near=False):
    return Encoder(Codecs.parse(codecs), is_near=is_near)


def encode(encoder, host, raw, *, save=0, base=None, sources=(), tensor=MASTER, pressure="none"):
    context = ChunkContext((tensor,) * -(-len(raw) // MIB), save, base)
    return encode_as(encoder, host, raw, context, sources, pressure)


def encode_as(encoder, host, raw, context, sources=(), pressure="none"):
    memory = memoryview(bytearray(raw))
    return encoder.encode(memory, context, sources, into=memory, bases=host, pressure=pressure)


def decoded(encoded, raw, reference=b""):
    """Return the raw bytes that a reader decodes."""
    out, factor, at = bytearray(len(raw)), len(reference) // len(raw), 0
    for block, target in zip(encoded.blocks, blocks_of(memoryview(out)), strict=True):
        base = memoryview(reference)[at * factor : (at + len(target)) * factor] if factor else None
        decode_block(block.codec, memoryview(bytes(block.data)), target, base, "chunk")
        assert digest.hash_bytes(XXH3, target) == digest.hash_bytes(XXH3, memoryview(raw)[at : at + len(target)])
        at += len(target)
    return bytes(out)


def codecs_of(encoded):
    return {block.codec for block in encoded.blocks}


def reasons_of(encoded):
    return {block.reason for block in encoded.blocks}


def numbers(seed=0, count=MIB // 2):
    return Training(count, seed).master


def near(master, size=1e-6):
    noise = np.random.default_rng(1).standard_normal(master.size) * size
    return (master * (1 + noise)).astype("<f4")


def test_a_tensor_is_tried_out_once_and_then_remembered(host, tried):
    encoder = encoder_for()
    for save in range(4):
        raw = numbers(save).tobytes()
        encoded = encode(encoder, host, raw, save=save)
        assert codecs_of(encoded) == {Codec.PLANE}
        assert decoded(encoded, raw) == raw
    assert tried == [False]


def test_it_is_tried_out_again_now_and_then(host, tried):
    encoder, raw = encoder_for(), numbers().tobytes()
    for save in range(2 * REPROBE_SAVES):
        encode(encoder, host, raw, save=save)
    assert len(tried) == 2


def test_saves_that_are_counted_anew_do_not_keep_it_from_being_tried_again(host, tried):
    encoder, raw = encoder_for(), numbers().tobytes()
    encode(encoder, host, raw, save=1000)
    encode(encoder, host, raw, save=1)
    assert len(tried) == 2


def test_it_is_tried_out_again_when_there_is_something_to_encode_it_against(host, tried):
    encoder, master = encoder_for(), numbers()
    base = host.chunk(master.tobytes(), host.local)
    encode(encoder, host, master.tobytes())
    raw = near(master).tobytes()
    for save in range(1, 3):
        encoded = encode(encoder, host, raw, save=save, base=base)
        assert codecs_of(encoded) == {Codec.DPLANE}
        assert encoded.needs == (base.name,)
        assert decoded(encoded, raw, master.tobytes()) == raw
    assert tried == [False, True]


@pytest.mark.parametrize("size", [1e-6, 1e-3, 30])
def test_a_delta_is_taken_only_where_it_is_worth_its_base(host, size):
    master = numbers()
    raw = near(master, size).tobytes()
    alone = sum(len(block.data) for block in encode(encoder_for(), host, raw).blocks)
    encoded = encode(encoder_for(), host, raw, base=host.chunk(master.tobytes(), host.local))
    length = sum(len(block.data) for block in encoded.blocks)
    if encoded.bases:
        assert length < 1.05 * DELTA_WORTH * alone  # decided by a sample
    else:
        assert length == alone
        assert reasons_of(encoded) == {Reason.DELTA_TOO_LARGE}
    assert bool(encoded.bases) == (size < 1)


def test_a_diverged_tensor_is_tried_again(host, tried):
    encoder, master = encoder_for(), numbers()
    base = host.chunk(master.tobytes(), host.local)
    encode(encoder, host, near(master).tobytes(), save=1, base=base)
    far = numbers(7).tobytes()
    assert codecs_of(encode(encoder, host, far, save=2, base=base)) <= {Codec.DPLANE, Codec.STORE}
    assert len(tried) == 1
    encoded = encode(encoder, host, far, save=3, base=base)
    assert len(tried) == 2
    assert codecs_of(encoded) == {Codec.PLANE}
    assert not encoded.bases


def test_a_base_on_this_host_is_not_fetched(host):
    master = numbers()
    base = host.chunk(master.tobytes(), host.local)
    assert encode(encoder_for(), host, near(master).tobytes(), base=base).bases
    assert host.fetches == 0


def test_a_base_that_is_damaged_on_this_host_is_fetched(host):
    master = numbers()
    base = host.chunk(master.tobytes(), host.remote)
    host.local[base.name.digest] = b"x" + master.tobytes()[1:]
    raw = near(master).tobytes()
    assert decoded(encode(encoder_for(), host, raw, base=base), raw, master.tobytes()) == raw
    assert host.fetches == 1


def test_an_absent_base_teaches_nothing(host, tried):
    encoder, master = encoder_for(), numbers()
    base, raw = host.chunk(master.tobytes(), {}), near(master).tobytes()
    assert codecs_of(encode(encoder, host, raw, base=base)) == {Codec.PLANE}
    host.chunk(master.tobytes(), host.local)
    assert codecs_of(encode(encoder, host, raw, save=1, base=base)) == {Codec.DPLANE}
    assert tried == [False, True]


def test_that_a_difference_is_too_large_is_remembered_of_a_tensor(host):
    encoder, raw = encoder_for(), numbers().tobytes()
    base, tried_at = host.chunk(os.urandom(len(raw)), host.local), []
    for save in range(4 * REPROBE_SAVES):
        reads = host.reads
        assert reasons_of(encode(encoder, host, raw, save=save, base=base)) == {Reason.DELTA_TOO_LARGE}
        if host.reads > reads:
            tried_at.append(save)
    assert tried_at == [0, 1, 3, 7, 15, 31, 47, 63]


def test_chunks_that_are_tried_at_the_same_time_count_once(host):
    encoder, raw, together = encoder_for(), numbers().tobytes(), threading.Barrier(4)
    base = host.chunk(os.urandom(len(raw)), host.local)

    class Slow(Host):
        local = host.local

        def read_base(self, row, out):
            if not together.broken:
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(1)
                together.abort()
            return host.read_base(row, out)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: encode(encoder, Slow(), raw, base=base), range(4)))
    reads = host.reads
    encode(encoder, host, raw, save=1, base=base)
    assert host.reads > reads


def test_a_new_keyframe_brings_back_differences(host):
    # The sample differs too much from its base once. The next save has a closer base.
    encoder, far, raw = encoder_for(), os.urandom(4 * MIB), numbers().tobytes()
    encode(encoder, host, raw, base=host.chunk(far[: len(raw)], host.local))
    base = host.chunk(raw, host.local)
    later = near(numbers(), 1e-5).tobytes()
    assert codecs_of(encode(encoder, host, later, save=1, base=base)) == {Codec.DPLANE}


def test_a_sample_that_says_too_much_good_of_the_rest_is_not_believed_for_long(host):
    # The first block of the tensor does not change, the others are noise.
    encoder, still, saves = encoder_for(), numbers()[: MIB // 4].tobytes(), 4 * REPROBE_SAVES
    alone = total = 0
    base = host.chunk(still + numbers(99).tobytes()[: 3 * MIB], host.local)
    for save in range(saves):
        raw = still + numbers(save).tobytes()[: 3 * MIB]
        total += sum(len(block.data) for block in encode(encoder, host, raw, save=save, base=base).blocks[1:])
        alone += sum(len(block.data) for block in encode(encoder_for(), host, raw).blocks[1:])
    assert total < 1.03 * alone


@pytest.mark.parametrize(("is_near", "fetches"), [(True, 1), (False, 0)])
def test_a_base_of_unnamed_bytes_is_fetched_from_this_host_alone(host, is_near, fetches):
    raw = os.urandom(2 * MIB)
    base = host.chunk(raw, host.remote)
    encoded = encode(encoder_for("auto", is_near=is_near), host, raw, base=base, tensor=Tensor())
    assert (len(encoded.bases), host.fetches) == (fetches, fetches)


def test_an_unknown_name_is_examined_for_itself(host):
    encoder, kind = encoder_for("auto"), ("bytes", 1)
    for number in range(3):
        raw = os.urandom(MIB)
        base = host.chunk(os.urandom(MIB), host.remote)
        encode(encoder, host, raw, base=base, tensor=Tensor(f"{number}", *kind))
    assert host.fetches == 3


def test_a_base_is_fetched_for_one_tensor_of_which_nothing_is_known(host):
    encoder, raw = encoder_for("auto"), os.urandom(2 * MIB)
    known, unknown = (Tensor(name, "float", 4) for name in "ku")
    base = host.chunk(os.urandom(MIB), host.remote)
    encode(encoder, host, raw[:MIB], base=base, tensor=known)
    base = host.chunk(os.urandom(2 * MIB), host.remote)
    for _ in range(2):
        encode_as(encoder, host, raw, ChunkContext((known, unknown), 0, base))
    assert host.fetches == 2


def test_a_base_that_cannot_be_read_is_none(host):
    encoder, master = encoder_for(), numbers()
    gone = host.chunk(master.tobytes(), {})
    raw = near(master).tobytes()
    encoded = encode(encoder, host, raw, base=gone)
    assert not encoded.bases
    assert decoded(encoded, raw) == raw
    assert encoder.status()["unreadable_bases"] == 1


@pytest.mark.parametrize("codecs", ["off", "zstd,plane", "plane,derive"])
def test_a_base_is_not_read_where_nothing_is_to_be_encoded_against_one(host, tried, codecs):
    encoder, master = encoder_for(codecs), numbers()
    base = host.chunk(master.tobytes(), host.remote)
    for save in range(3):
        assert not encode(encoder, host, near(master).tobytes(), save=save, base=base).bases
    assert (host.reads, host.fetches, len(tried)) == (0, 0, 1)


@pytest.mark.parametrize(
    ("codecs", "pressure", "codec"),
    [
        ("auto", "none", Codec.PLANE),
        ("auto", "backlog", Codec.STORE),
        ("all", "backlog", Codec.PLANE),
        ("all", "caller", Codec.PLANE),
    ],
)
def test_a_chunk_goes_raw_only_under_pressure(host, codecs, pressure, codec):
    encoder, raw = encoder_for(codecs), numbers().tobytes()
    encoded = encode(encoder, host, raw, pressure=pressure)
    assert codecs_of(encoded) == {codec}
    assert decoded(encoded, raw) == raw
    assert (reasons_of(encoded) == {Reason.LINK_IS_FASTER}) is (codec is Codec.STORE)
    assert codecs_of(encode(encoder, host, raw)) == {Codec.PLANE}, "nothing presses any more"


class TickingClock(ManualClock):
    """Each look at it takes 10 ms, so that the encoder spends 10 ms on each chunk."""

    def monotonic(self):
        self.sleep(0.01)
        return super().monotonic()


@pytest.mark.parametrize(("send_s", "codec"), [(0.0, Codec.STORE), (1.0, Codec.PLANE)], ids=["fast way", "slow way"])
def test_a_waiting_caller_gets_raw_chunks_over_a_faster_way(host, send_s, codec):
    clock, raw = TickingClock(), numbers().tobytes()
    encoder = Encoder(Codecs.parse("auto"), is_near=True, clock=clock)
    found = []
    for _ in range(40):
        found.append(codecs_of(encode(encoder, host, raw, pressure="caller")))
        with encoder.sending(2 * len(raw)):
            clock.sleep(send_s)
    assert found[0] == {Codec.PLANE}, "nothing is known of the way yet"
    assert found[-1] == {codec}
    assert codecs_of(encode(encoder, host, raw)) == {Codec.PLANE}, "no caller waits"
    clock.sleep(60)
    assert codecs_of(encode(encoder, host, raw, pressure="caller")) == {Codec.PLANE}, "old speeds do not count"


def test_other_codecs_begin_with_the_next_chunk(host):
    encoder, raw = encoder_for("off"), numbers().tobytes()
    assert codecs_of(encode(encoder, host, raw)) == {Codec.STORE}
    encoder.use(Codecs.parse("all"))
    assert codecs_of(encode(encoder, host, raw)) == {Codec.PLANE}


def test_codecs_off_stores_raw_bytes(host):
    encoded = encode(encoder_for("off"), host, numbers().tobytes())
    assert codecs_of(encoded) == {Codec.STORE}


def test_a_working_copy_is_derived_from_its_master(host):
    master = numbers()
    source = host.chunk(master.tobytes(), host.local)
    raw = bfloat16(master)
    half = len(raw)
    pieces = [SourcePiece(source, 0, half), SourcePiece(source, half, half)]
    encoded = encode(encoder_for(), host, raw, sources=pieces, tensor=Tensor("w", "float", 2))
    assert codecs_of(encoded) == {Codec.DERIVE}
    assert decoded(encoded, raw, master.tobytes()) == raw
    assert [(base.offset, base.length) for base in encoded.bases] == [(0, half), (half, half)]


def test_a_failed_derivation_is_encoded_otherwise(host):
    source = host.chunk(numbers().tobytes(), host.local)
    raw = bfloat16(numbers(3))
    pieces = [SourcePiece(source, 0, 2 * len(raw))]
    encoded = encode(encoder_for(), host, raw, sources=pieces, tensor=Tensor("w", "float", 2))
    assert not encoded.bases
    assert decoded(encoded, raw) == raw


def test_a_source_that_is_damaged_on_this_host_is_none(host):
    master = numbers()
    raw = bfloat16(master)
    source = host.chunk(master.tobytes() + b"more", host.local)
    pieces = [SourcePiece(source, 0, 2 * len(raw))]
    encoder = encoder_for()
    assert encode(encoder, host, raw, sources=pieces, tensor=Tensor("w", "float", 2)).bases
    sound = host.local[source.name.digest]
    host.local[source.name.digest] = bytes(len(sound))
    other = host.chunk(numbers(seed=9).tobytes() + b"else", host.local)
    encode(encoder, host, raw, sources=[SourcePiece(other, 0, 2 * len(raw))], tensor=Tensor("w", "float", 2))
    # If this chunk's zeros equal the rounded copy of the bad bytes, a derivation would use bytes that no reader gets.
    assert not encode(encoder, host, bytes(len(raw) - 2) + b"ab", sources=pieces, tensor=Tensor("z", "float", 2)).bases


@pytest.mark.parametrize("how", ["gone", "fails"])
def test_a_source_that_goes_is_not_taken_for_the_one_before(host, how):
    # The failed read has overwritten the buffer that held the previous source.
    encoder, masters = encoder_for(), [numbers(seed, MIB // 4) for seed in range(2)]
    rows = [host.chunk(master.tobytes(), host.local) for master in masters]
    half = len(host.local[rows[0].name.digest]) // 2
    read = host.read_source

    def derives(index):
        raw, source = bfloat16(masters[index][: half // 4]), masters[index].tobytes()[:half]
        encoded = encode(
            encoder, host, raw, sources=[SourcePiece(rows[index], 0, half)], tensor=Tensor(f"{index}", "float", 2)
        )
        assert decoded(encoded, raw, source if encoded.bases else b"") == raw
        return bool(encoded.bases)

    def bad(_row, out):
        out[:] = b"?" * len(out)
        if how == "fails":
            raise OSError("it fails")
        return False

    assert derives(0)
    host.read_source = bad
    if how == "fails":
        with pytest.raises(OSError, match="it fails"):
            derives(1)
    else:
        assert not derives(1)
    host.read_source = read
    assert derives(0)
    assert derives(1)


def test_blocks_of_two_tensors_are_encoded_as_each_would_be_by_itself(host):
    first = numbers(1, MIB // 4)
    raw, tensors = np.square(first).tobytes() + first.tobytes(), [Tensor(name, "float", 4) for name in ("v", "m")]
    found = encode_as(encoder_for(), host, raw, ChunkContext(tuple(tensors)))
    alone = [
        encode(encoder_for(), host, raw[at : at + MIB], tensor=tensor)
        for at, tensor in zip((0, MIB), tensors, strict=True)
    ]
    assert [len(block.data) for block in found.blocks] == [len(encoded.blocks[0].data) for encoded in alone]


def test_a_source_that_is_not_on_this_host_is_none(host):
    master = numbers()
    source = host.chunk(master.tobytes(), host.remote)
    raw = bfloat16(master)
    encoded = encode(
        encoder_for(), host, raw, sources=[SourcePiece(source, 0, 2 * len(raw))], tensor=Tensor("w", "float", 2)
    )
    assert not encoded.bases
    assert host.fetches == 0


@pytest.mark.parametrize("size", [1, 7, MIB - 1, 3 * MIB + 5])
@pytest.mark.parametrize("tensor", [MASTER, Tensor("i", "integer", 8)])
def test_chunks_of_any_length_come_back(host, size, tensor):
    base, raw = os.urandom(size), bytearray(os.urandom(size))
    raw[: size // 2] = base[: size // 2]
    encoded = encode(encoder_for(), host, bytes(raw), base=host.chunk(base, host.local), tensor=tensor)
    assert decoded(encoded, bytes(raw), base if encoded.bases else b"") == raw


def test_many_threads_encode_against_the_same_chunks(host):
    encoder, masters = encoder_for(), [numbers(seed, MIB // 4) for seed in range(4)]
    bases = [host.chunk(master.tobytes(), host.local) for master in masters]

    def one(index):
        master, base = masters[index % 4], bases[index % 4]
        if index % 3:
            raw, reference = near(master).tobytes(), master.tobytes()
            encoded = encode(encoder, host, raw, save=index, base=base, tensor=Tensor(f"{index % 4}", "float", 4))
        else:
            raw, reference = bfloat16(master), master.tobytes()
            encoded = encode(encoder, host, raw, save=index, sources=[SourcePiece(base, 0, base.raw_length)])
        return decoded(encoded, raw, reference if encoded.bases else b"") == raw

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(96)))
    assert encoder.status()["derive_blocks"] == 32


@pytest.mark.parametrize("breaks", [False, True])
def test_a_base_in_an_object_tier_of_this_host_is_fetched_at_once(host, monkeypatch, breaks):
    monkeypatch.setattr(buffers, "shared", Buffers())
    master, fetch, wanted = numbers(count=MIB), host.fetch, []
    whole, base = near(master).tobytes(), host.chunk(master.tobytes(), host.remote)

    def noted(row, out):
        wanted.append(len(out))
        if breaks:
            raise CorruptionError("it is damaged")
        fetch(row, out)

    encoder, raw = encoder_for(is_near=True), memoryview(bytearray(whole))
    context = ChunkContext((Tensor("w", "float", 4),) * 4, 0, base)
    host.fetch = noted
    encoded = encoder.encode(raw, context, (), into=raw, bases=host)
    assert decoded(encoded, whole, b"" if breaks else master.tobytes()) == whole
    assert bool(encoded.bases) is not breaks
    assert wanted == [4 * MIB]
    assert encoder.status().get("unreadable_bases", 0) == breaks
    assert encoder.status().get("fetched_base_bytes", 0) == (0 if breaks else 4 * MIB)
    assert buffers()._taken == 0


@pytest.mark.parametrize(
    ("codecs", "codec"), [("off", Codec.STORE), ("store", Codec.STORE), ("zstd,plane", Codec.CONST)]
)
def test_constant_blocks_need_permission(host, codecs, codec):
    encoded = encode(encoder_for(codecs), host, bytes(2 * MIB), tensor=MASTER)
    assert {block.codec for block in encoded.blocks} == {codec}
    assert (sum(len(block.data) for block in encoded.blocks) == 2 * MIB) is (codec is Codec.STORE)


def test_a_failed_derivation_respects_forbidden_planes(host):
    numbers = np.random.default_rng(1).standard_normal(MIB, dtype=np.float32)
    wide, narrow = numbers.tobytes(), bytearray(bfloat16(numbers))
    narrow[MIB:] = np.random.default_rng(2).bytes(MIB)
    pieces = [SourcePiece(host.chunk(wide, host.local), 0, len(wide))]
    encoded = encode(encoder_for("derive"), host, bytes(narrow), sources=pieces, tensor=Tensor("w", "float", 2))
    assert [block.codec for block in encoded.blocks] == [Codec.DERIVE, Codec.STORE]
