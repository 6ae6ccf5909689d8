"""Bases of a save: found or given, and never a chunk that a reader might lack."""

from __future__ import annotations

import io
import sys
import uuid

import pytest
from support.saving import Flushing, Training, bfloat16, condemn, remove, safetensors

from tierfs.errors import ConflictError, StoreError
from tierfs.flusher.publish import StorePublisher
from tierfs.format import keys
from tierfs.format.envelope import block_count
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.store import delete, load, rename, save, verify
from tierfs.store.encode.keyframes import KEYFRAME_SAVES
from tierfs.store.encode.tensors import ChunkContext, Tensor, group_of
from tierfs.store.tree.records import observe
from tierfs.testing import Fault, FaultyObjects

MIB = 1 << 20


@pytest.fixture
def objects():
    return MemoryObjects(f"/lineage-{uuid.uuid4().hex}")


@pytest.fixture
def flushing(objects):
    return Flushing(objects)


@pytest.fixture
def training():
    return Training()


def path_of(step):
    return f"run/step_{step}/shard.safetensors"


def needs(rows):
    return {name for row in rows for name in row.bases}


def names(rows):
    return {row.name for row in rows}


def test_a_save_is_encoded_against_the_one_before(flushing, training):
    first = flushing.save(path_of(10), training.file())
    data = training.step().file()
    second = flushing.save(path_of(20), data)
    assert not needs(first)
    assert needs(second) <= names(first)
    assert flushing.codecs_of(second)["DPLANE"] == 2
    assert load(flushing.bare(), path_of(20)) == data


def test_saves_are_encoded_against_the_keyframe_until_it_is_old(flushing, training):
    saves = [flushing.save(path_of(step), training.step().file()) for step in range(KEYFRAME_SAVES + 3)]
    keyframes = [number for number, rows in enumerate(saves) if not needs(rows)]
    assert keyframes == [0, KEYFRAME_SAVES + 1]
    for number, rows in enumerate(saves):
        if number not in keyframes:
            assert needs(rows) <= names(saves[max(frame for frame in keyframes if frame < number)])


def test_a_store_without_chains_has_no_deltas(objects, training):
    flushing = Flushing(objects, chain_max=0)
    first = flushing.save(path_of(1), training.pair())
    data = training.step().pair()
    second = flushing.save(path_of(2), data)
    assert flushing.codecs_of(second)["DPLANE"] == 0
    assert flushing.codecs_of(second)["DERIVE"] == 1, "what is derived from what stands alone is no chain"
    assert needs(second) <= names(second)
    assert not needs(first) - names(first)
    assert load(flushing.bare(), path_of(2)) == data


def test_a_refused_encoding_goes_another_way(objects, training):
    # The buffer no longer holds the encoded bytes.
    faulty = FaultyObjects(objects)
    flushing = Flushing(faulty)
    data = training.file()
    faulty.inject(Fault.REFUSED, method="put", key_part=keys.CHUNKS)
    with pytest.raises(StoreError):
        flushing.save(path_of(1), data)
    flushing.publisher = StorePublisher(lambda: flushing.store)
    rows = flushing.save(path_of(1), data)
    assert flushing.codecs_of(rows)["PLANE"] == 2
    assert load(flushing.bare(), path_of(1)) == data


@pytest.mark.parametrize("chain_max", [1, 2])
def test_a_delta_is_no_base_where_the_descriptor_allows_one_step(objects, training, chain_max):
    flushing = Flushing(objects, chain_max=chain_max)
    flushing.save(path_of(1), training.file())
    delta = next(row for row in flushing.save(path_of(2), training.step().file()) if row.bases)
    raw = bytearray(flushing.local[delta.name.digest])
    raw[:4] = bytes(4)  # almost everything else is equal
    context = ChunkContext((Tensor("w", "float", 4),), 2, base=delta)
    row = flushing.put(raw, context, ())
    assert (delta.name in row.bases) == (chain_max > 1)


def test_a_copy_is_derived_from_a_delta(flushing, training):
    flushing.save(path_of(1), training.pair())
    data = training.step().pair()
    rows = flushing.save(path_of(2), data)
    (derived,) = [row for row in rows if flushing.codecs_of([row])["DERIVE"]]
    assert len(derived.bases) == 2
    assert load(flushing.bare(), path_of(2)) == data
    assert not verify(flushing.bare()).damage


def test_too_many_sources_prevent_derivation(flushing):
    def tensors(training):
        # Each master weight makes its own chunk. The working copies of 35 of them make one chunk together.
        pieces, at = [], 0
        for count in [20_000, 262_144] * 4 + [262_144] * 27:
            pieces.append(training.master[at : at + count])
            at += count
        wide = {f"master.{number:02d}": ("F32", piece.tobytes()) for number, piece in enumerate(pieces)}
        narrow = {f"weight.{number:02d}": ("BF16", bfloat16(piece)) for number, piece in enumerate(pieces)}
        return safetensors({**wide, **narrow})

    training = Training(32 * 262_144)
    flushing.save(path_of(1), tensors(training))
    data = tensors(training.step())
    rows = flushing.save(path_of(2), data)
    assert max(len(row.bases) for row in rows) <= 64
    assert load(flushing.bare(), path_of(2)) == data


@pytest.mark.parametrize(("frozen", "derived"), [(300, True), (9000, False)], ids=["a little", "too much"])
def test_a_chunk_with_a_little_else_in_it_is_derived(flushing, training, frozen, derived):
    def adapters(training):
        # Each layer has the adapter's working copy and a frozen norm, which is derived from nothing.
        tensors = {"model.head": ("BF16", bytes(range(256)) * 8192)}
        for number in range(10):
            piece = training.master[20_000 * number : 20_000 * (number + 1)]
            tensors = {f"master.{number}": ("F32", piece.tobytes()), **tensors}
            tensors[f"model.{number}.adapter"] = ("BF16", bfloat16(piece))
            tensors[f"model.{number}.norm"] = ("BF16", bytes([63, number]) * frozen)
        return safetensors(tensors)

    flushing.save(path_of(1), adapters(training))
    data = adapters(training.step())
    rows = flushing.save(path_of(2), data)
    assert (flushing.codecs_of(rows)["DERIVE"] > 0) == derived
    assert load(flushing.bare(), path_of(2)) == data
    assert not verify(flushing.bare()).damage


def test_a_given_parent_counts(flushing, training):
    base = flushing.save("elsewhere/pretrained.safetensors", training.file())
    rows = flushing.save("runs/tuned/model", training.step().file(), {"parent": "elsewhere/pretrained.safetensors"})
    assert needs(rows)
    assert needs(rows) <= names(base)


@pytest.mark.parametrize("form", ["/{}", "tierfs::store/{}"])
def test_a_parent_may_be_given_as_a_url_of_the_store(flushing, training, form):
    path = "elsewhere/pretrained.safetensors"
    base = flushing.save(path, training.file())
    flushing.restart()
    rows = flushing.save("runs/tuned/model", training.step().file(), {"parent": form.format(path)})
    assert needs(rows)
    assert needs(rows) <= names(base)


def test_a_parent_that_is_not_there_is_counted(flushing, training):
    flushing.save("model", training.file(), {"parent": "nowhere"})
    assert flushing.publisher.asked()["codecs"]["unknown_parents"] == 1


@pytest.mark.parametrize("parent", ["nowhere", "../out", "a\0b", 7])
def test_a_parent_that_is_none_keeps_nobody_from_saving(flushing, training, parent):
    data = training.file()
    assert not needs(flushing.save("model", data, {"parent": parent}))
    assert load(flushing.bare(), "model") == data


def test_a_flusher_that_begins_anew_finds_the_save_before_and_fetches_it_once(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    first = flushing.save(path_of(1), training.file())
    flushing.restart()
    flushing.local.clear()
    data = training.step().file()
    before = measured.snapshot()["get"]["requests"]
    second = flushing.save(path_of(2), data)
    # One read for the file's layout, which is in its header, and one for each block of the base.
    blocks = sum(block_count(row.raw_length) for row in first)
    assert measured.snapshot()["get"]["requests"] - before <= 3 + blocks
    assert needs(second)
    assert needs(second) <= names(first)
    assert load(flushing.bare(), path_of(2)) == data


def test_a_flusher_that_begins_anew_goes_on_with_what_the_save_before_is_encoded_against(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    first = flushing.save(path_of(1), training.file())
    flushing.save(path_of(2), training.step().file())
    for step in (3, 4):
        flushing.restart()
        delete(flushing.store, path_of(step - 2))  # the chunks stay, since later saves name them
        before = measured.snapshot()["get"]["requests"]
        data = training.step().file()
        rows = flushing.save(path_of(step), data)
        assert needs(rows)
        assert needs(rows) <= names(first)
        # One envelope for each delta, plus the reads for the file's layout, and leases.
        assert measured.snapshot()["get"]["requests"] - before <= 8
        assert load(flushing.bare(), path_of(step)) == data
    assert not verify(flushing.bare()).damage


def test_a_difference_that_cannot_be_read_is_no_way_to_what_it_was_encoded_against(flushing, objects, training):
    flushing.save(path_of(1), training.file())
    deltas = [row for row in flushing.save(path_of(2), training.step().file()) if row.bases]
    flushing.restart()
    objects.put(keys.chunk_key(deltas[0].name), [b"rubbish" * 10_000])
    data = training.step().file()
    rows = flushing.save(path_of(3), data)
    assert len([row for row in rows if row.bases]) == len(deltas) - 1
    assert load(flushing.bare(), path_of(3)) == data


def test_sources_of_copies_are_no_bases_of_deltas(flushing, training):
    flushing.save(path_of(1), training.pair())
    flushing.restart()
    series = flushing.publisher.plan(flushing.draft(path_of(2), training.step().pair()), flushing).contexts
    assert {context.base.raw_length for context in series if context.base} == {len(training.master.tobytes())}


@pytest.mark.parametrize("restarts", [False, True])
def test_the_step_may_be_in_names_below_and_may_be_there_for_something_else(flushing, training, restarts):
    def path(step, rank):
        return f"run/step_{step}/rank_{rank}/step{step}.safetensors"

    first = {rank: flushing.save(path(1, rank), Training(seed=rank).file()) for rank in (1, 2)}
    if restarts:
        flushing.restart()
    for rank, base in first.items():
        rows = flushing.save(path(2, rank), Training(seed=rank).step().file())
        assert needs(rows)
        assert needs(rows) <= names(base)


def torch_file(training, tensors):
    """Return the weights as `torch.save` stores them, in ``tensors`` tensors."""
    torch = pytest.importorskip("torch")
    parts = torch.from_numpy(training.master.copy()).tensor_split(tensors)
    out = io.BytesIO()
    torch.save({f"layer.{number}": part.clone() for number, part in enumerate(parts)}, out)
    return out.getvalue()


def begin_anew(objects, training, tensors):
    """Save a file of many tensors and restart the flusher.

    Returns the flusher, the rows, the contexts of the next plan, and the requests and bytes that the plan read.
    """
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    rows = flushing.save(path_of(1), torch_file(training, tensors))
    flushing.restart()
    draft = flushing.draft(path_of(2), torch_file(training.step(), tensors))
    before = measured.snapshot()["get"]
    contexts = flushing.publisher.plan(draft, flushing).contexts
    after = measured.snapshot()["get"]
    return flushing, rows, contexts, {name: after[name] - before[name] for name in ("requests", "bytes")}


def test_a_flusher_that_begins_anew_fetches_no_block_of_the_save_before_twice(objects):
    training = Training(2 * MIB)
    _, rows, contexts, asked = begin_anew(objects, training, 200)
    blocks = sum(-(-row.raw_length // MIB) for row in rows)
    assert asked["requests"] <= 2 * blocks  # an envelope and a block
    assert asked["bytes"] <= blocks * (MIB + (128 << 10))
    assert {context.base.name for context in contexts if context.base is not None} <= names(rows)
    assert any(context.base for context in contexts)


def test_a_save_before_whose_tensors_lie_in_too_many_places_is_passed_over(objects, training, monkeypatch):
    monkeypatch.setattr(sys.modules["tierfs.store.encode.parents"], "LOOK_BLOCKS_MAX", 1)
    flushing, _, contexts, asked = begin_anew(objects, training, 20)
    assert asked["requests"] <= 2
    assert not any(context.base for context in contexts)
    assert flushing.publisher.asked()["codecs"]["unknown_layouts"] == 1
    data = torch_file(training, 20)
    flushing.save(path_of(3), data)
    assert load(flushing.bare(), path_of(3)) == data


def test_a_flusher_that_knows_the_save_before_asks_for_nothing_of_it(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    first = flushing.save(path_of(1), training.file())
    draft = flushing.draft(path_of(2), training.step().file())
    before = measured.snapshot()
    rows = flushing.upload(draft)
    after = measured.snapshot()
    asked = {name: after[name]["requests"] - before[name]["requests"] for name in ("read", "list")}
    assert not any(asked.values()), asked
    assert {name for row in rows for name in row.bases} <= names(first)


def test_a_flusher_that_begins_anew_lists_the_saves_and_not_what_is_in_each(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    for step in range(1, 7):
        rows = flushing.save(path_of(step), training.file())
    flushing.restart()
    before = measured.snapshot()["list"]["requests"]
    second = flushing.save(path_of(9), training.step().file())
    # The directories, the files of the newest save, leases, and condemned chunks.
    assert measured.snapshot()["list"]["requests"] - before == 4
    assert needs(second) <= names(rows)


def test_a_flusher_that_begins_anew_passes_over_saves_that_were_deleted(flushing, training):
    first = flushing.save(path_of(1), training.file())
    flushing.save(path_of(2), training.file())
    delete(flushing.store, path_of(2))
    flushing.restart()
    second = flushing.save(path_of(3), training.step().file())
    assert needs(second)
    assert needs(second) <= names(first)


def test_a_parent_that_was_deleted_is_none_once_the_lease_in_which_it_was_seen_is_over(flushing, objects, training):
    first = flushing.save(path_of(1), training.file())
    delete(flushing.store, path_of(1))
    flushing.clock.sleep(61)
    remove(objects, *names(first))
    data = training.step().file()
    assert not needs(flushing.save(path_of(2), data))
    assert load(flushing.bare(), path_of(2)) == data


def test_a_save_outlives_the_one_that_it_is_encoded_against(flushing, training):
    flushing.save(path_of(1), training.file())
    data = training.step().file()
    flushing.save(path_of(2), data)
    delete(flushing.store, path_of(1))
    rename(flushing.store, path_of(2), "kept")
    assert needs(observe(flushing.bare(), "kept").manifest.rows)
    assert load(flushing.bare(), "kept") == data
    assert not verify(flushing.bare()).damage


def test_a_parent_of_another_shape_is_no_base(flushing, training):
    flushing.save(path_of(1), Training(1 << 20).file())
    data = training.file()
    assert not needs(flushing.save(path_of(2), data))
    assert load(flushing.bare(), path_of(2)) == data


def test_a_parent_whose_record_is_damaged_keeps_nobody_from_saving(flushing, objects, training):
    flushing.save(path_of(1), training.file())
    flushing.restart()
    objects.put(keys.record_key(path_of(1)), [b"rubbish" * 10])
    data = training.step().file()
    assert not needs(flushing.save(path_of(2), data))
    assert load(flushing.bare(), path_of(2)) == data


def test_a_header_that_grows_and_a_tensor_that_comes_by_shift_no_base(flushing, training):
    first = flushing.save(path_of(1), training.file())
    other = Training(seed=9).master.tobytes()
    data = safetensors(
        {"added": ("F32", other), "master": ("F32", training.step().master.tobytes())}, {"note": "n" * 999}
    )
    rows = flushing.save(path_of(2), data)
    assert needs([rows[-1]]) <= names(first)
    assert needs([rows[-1]])
    assert not needs(rows[:-1])
    assert load(flushing.bare(), path_of(2)) == data


@pytest.mark.parametrize("is_lost", [False, True])
def test_one_of_concurrent_saves_becomes_the_keyframe(flushing, training, is_lost):
    # Saves that come before the new keyframe is published use the old one, for twice as long if that never happens.
    for step in range(KEYFRAME_SAVES + 1):
        old = flushing.save(path_of(step), training.step().file())
    contents = [training.step().file() for _ in range(4)]
    drafts = [flushing.draft(path_of(100 + step), data) for step, data in enumerate(contents)]
    uploads = [flushing.upload(draft) for draft in drafts]
    assert [bool(needs(rows)) for rows in uploads] == [False, True, True, True]
    assert needs(uploads[1]) <= needs(old)
    if is_lost:
        later = [flushing.save(path_of(200 + step), training.step().file()) for step in range(KEYFRAME_SAVES + 1)]
        assert [bool(needs(rows)) for rows in later] == [True] * KEYFRAME_SAVES + [False]
        return
    for draft, rows, data in zip(drafts, uploads, contents, strict=True):
        flushing.publish(draft, rows)
        assert load(flushing.bare(), draft.path) == data
    assert needs(flushing.save(path_of(300), training.step().file())) <= names(uploads[0])


def test_two_flushers_that_know_different_things_share_a_store(objects, training):
    here, there = Flushing(objects), Flushing(objects)
    for step in range(3):
        data = training.step().file()
        here.save(f"here/step_{step}/s", data)
        there.save(f"there/step_{2 * step}/s", data)
        unknown = training.step().file()
        here.save(f"here/step_{step}0/s", unknown)
        there.save(f"alone_{step}", unknown)  # stands alone, or is a chunk that is there already
        for path in (f"here/step_{step}0/s", f"alone_{step}"):
            assert load(here.bare(), path) == unknown
    assert not verify(here.bare()).damage


def test_bytes_that_did_not_change_are_not_encoded_against_themselves(flushing, training):
    data = training.file()
    first = flushing.save(path_of(1), data)
    draft = flushing.draft(path_of(2), data)
    contexts = flushing.publisher.plan(draft, flushing).contexts
    assert contexts[-1].base == first[-1]
    flushing.clock.sleep(61)  # the known chunks are forgotten, and the looks are used up
    while flushing.store.lease_cache.spend_look():
        pass
    raw = memoryview(flushing.local[first[-1].name.digest])
    row = flushing.put(raw, contexts[-1], [])
    assert row == first[-1]


@pytest.mark.parametrize("known", ["anew", "told"])
def test_bytes_that_the_save_before_names_are_stored_again_where_they_were_lost(flushing, objects, training, known):
    data = training.file()
    rows = flushing.save(path_of(1), data)
    if known == "anew":
        flushing.restart()
    flushing.clock.sleep(61)
    remove(objects, rows[-1].name)
    if known == "told":
        flushing.store.report_damage(rows[-1].name)
    assert flushing.save(path_of(1), data) == rows
    assert load(flushing.bare(), path_of(1)) == data


@pytest.mark.parametrize("is_here", [False, True], ids=["base elsewhere", "base on this host"])
def test_a_delta_whose_base_was_lost_is_not_taken_for_whole(flushing, objects, training, is_here):
    base = training.file()
    first = flushing.save(path_of(1), base)
    data = training.step().file()
    assert needs(flushing.save(path_of(2), data)) == {first[-1].name}
    flushing.restart()
    if not is_here:
        flushing.local.clear()
    remove(objects, first[-1].name)
    assert not needs(flushing.save(path_of(2), data))
    assert load(flushing.bare(), path_of(2)) == data
    flushing.save(path_of(1), base)
    assert verify(flushing.bare()).damage == []


@pytest.mark.parametrize("fails", [False, True], ids=["at once", "after a failure"])
def test_a_lost_base_is_stored_without_a_base(objects, training, fails):
    faulty = FaultyObjects(objects)
    flushing = Flushing(faulty)
    base = training.file()
    first = flushing.save(path_of(1), base)
    flushing.save(path_of(2), training.step().file())
    remove(objects, first[-1].name)
    flushing.publisher.report_damage(keys.chunk_key(first[-1].name))
    later = [flushing.save(path_of(step), training.step().file()) for step in (3, 4)]
    assert not needs(later[0])
    assert needs(later[1]) <= names(later[0])
    if fails:
        faulty.inject(Fault.REFUSED, method="put", key_part=keys.chunk_key(first[-1].name))
        with pytest.raises(StoreError):
            flushing.save(path_of(1), base)
    assert flushing.save(path_of(1), base)[-1] == first[-1]
    assert verify(flushing.bare()).damage == []
    assert needs(flushing.save(path_of(5), base[:-4] + b"else")), "from then on it is a chunk like others"


def test_a_file_that_did_not_change_is_read_back_and_none_of_it_is_put(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    data = training.file()
    rows = flushing.save(path_of(1), data)
    flushing.restart()
    before = measured.snapshot()
    assert flushing.save(path_of(1), data) == rows
    after = measured.snapshot()
    asked = {name: after[name]["requests"] - before[name]["requests"] for name in ("get", "put")}
    # One read of the header, for the layout. Each of the two chunks is read back, the second one after a look at
    # its envelope.
    assert asked == {"get": 1 + 2 + 1, "put": 2}
    flushing.clock.sleep(61)
    before = measured.snapshot()
    assert flushing.save(path_of(2), data) == rows
    after = measured.snapshot()
    assert after["get"]["bytes"] - before["get"]["bytes"] < len(data) / 2, "in each further lease one block is read"


def test_a_condemned_chunk_is_no_base(flushing, objects, training):
    first = flushing.save(path_of(1), training.file())
    draft = flushing.draft(path_of(2), training.step().file())
    contexts = flushing.publisher.plan(draft, flushing).contexts
    condemn(objects, *names(first))
    flushing.clock.sleep(31)
    raw = memoryview(flushing.local[draft.record.rows[-1].name.digest])
    assert not flushing.put(raw, contexts[-1], []).bases


@pytest.mark.parametrize("gone", ["condemned", "deleted"])
def test_a_chunk_that_lost_its_base_is_stored_anew(flushing, objects, training, gone):
    first = flushing.save(path_of(1), training.file())
    data = training.step().file()
    draft = flushing.draft(path_of(2), data)
    uploaded = flushing.upload(draft)
    assert needs(uploaded)
    delete(flushing.store, path_of(1))
    if gone == "condemned":
        condemn(objects, *names(first))
        flushing.clock.sleep(31)
    else:
        flushing.clock.sleep(61)
    remove(objects, *names(first))
    assert not needs(flushing.publish(draft, uploaded))
    assert load(flushing.bare(), path_of(2)) == data


def test_a_delta_put_after_its_base_was_forgotten_and_lost_is_stored_anew(flushing, objects, training):
    first = flushing.save(path_of(1), training.file())
    data = training.step().file()
    draft = flushing.draft(path_of(2), data)
    contexts = flushing.publisher.plan(draft, flushing).contexts
    flushing.clock.sleep(61)
    remove(objects, *names(first))
    rows = [
        flushing.put(flushing.local[row.name.digest], context, [])
        for row, context in zip(draft.record.rows, contexts, strict=True)
    ]
    assert not needs(flushing.publish(draft, rows))
    assert load(flushing.bare(), path_of(2)) == data


def test_a_chunk_that_is_nowhere_any_more_is_not_published(flushing, objects, training):
    first = flushing.save(path_of(1), training.file())
    draft = flushing.draft(path_of(2), training.step().file())
    uploaded = flushing.upload(draft)
    flushing.clock.sleep(61)
    remove(objects, *names(first))
    flushing.local.clear()
    with pytest.raises(StoreError, match="write the file again"):
        flushing.publish(draft, uploaded)
    assert observe(flushing.bare(), path_of(2)).record is None


def test_a_keyframe_that_was_stored_anew_while_it_was_published_is_what_counts(flushing, objects, training):
    draft = flushing.draft(path_of(1), training.file())
    uploaded = flushing.upload(draft)
    condemn(objects, *names(uploaded))
    flushing.clock.sleep(31)
    keyframe = flushing.publish(draft, uploaded)
    assert {name.generation for name in names(keyframe)} == {1}
    rows = flushing.save(path_of(2), training.step().file())
    assert needs(rows)
    assert needs(rows) <= names(keyframe)


def test_chunks_of_a_file_that_is_retried_are_derived_once_their_sources_are_there(flushing, training):
    draft = flushing.draft(path_of(1), training.pair())
    contexts = flushing.publisher.plan(draft, flushing).contexts
    (index,) = [index for index, context in enumerate(contexts) if context.sources]
    raw = memoryview(flushing.local[draft.record.rows[index].name.digest])
    half = [None] * len(contexts)
    assert not flushing.put(raw, contexts[index], half).bases
    rows = flushing.save(path_of(2), training.step().pair())
    assert flushing.codecs_of(rows)["DERIVE"]


def test_files_of_other_kinds_are_stored(flushing):
    contents = {
        "byte": b"\0",
        "text": b"no layout at all, " * 9999,
        "cut": safetensors({"a": ("F32", bytes(MIB))})[:-5],
        "liar": (1 << 60).to_bytes(8, "little") + b"{" * 70_000,
        "deep": (200_000).to_bytes(8, "little") + b'{"a":' * 40_000 + b" " * MIB,
        "nothing": safetensors({}) + b" " * 70_000,
        "empty tensors": safetensors({"a": ("F32", b""), "b": ("BF16", b"")}) + bytes(70_000),
    }
    for turn in range(2):
        for name, data in contents.items():
            flushing.save(f"run/step_{turn}/{name}", data)
            assert load(flushing.bare(), f"run/step_{turn}/{name}") == data


@pytest.mark.usefixtures("indirect")
def test_an_indirect_file_is_encoded_against_an_indirect_one(flushing, training):
    flushing.save(path_of(1), training.file())
    for _ in range(2):
        data = training.step().file()
        flushing.save(path_of(2), data)
        manifest = observe(flushing.bare(), path_of(2)).manifest
        assert manifest.indirect
        assert load(flushing.bare(), path_of(2)) == data
        flushing.restart()
    assert flushing.publisher.plan(flushing.draft(path_of(3), training.step().file()), flushing).contexts[-1].base


def test_many_small_tensors_are_planned_in_no_time(flushing):
    training = Training(3_000 * 64)
    cut = training.master.reshape(3_000, -1)
    unrelated = Training(3_000 * 64, seed=5).master.reshape(3_000, -1)
    wide = {f"layers.{n}.norm.exp_avg": ("F32", numbers.tobytes()) for n, numbers in enumerate(cut)}
    narrow = {f"layers.{n}.norm": ("BF16", bfloat16(numbers)) for n, numbers in enumerate(unrelated)}
    draft = flushing.draft(path_of(1), safetensors({**wide, **narrow}))
    flushing.reads = 0
    flushing.publisher.plan(draft, flushing)
    assert flushing.reads < 3 * 6_000


SAME = [
    ("run/step_1/a.safetensors", "run/step_20/a.safetensors"),
    ("run/step_1/__0_0.distcp", "run/step_2/__0_0.distcp"),
    ("run/global_step1/mp_rank_00.pt", "run/global_step2/mp_rank_00.pt"),
    ("run/epoch=1-step=20.ckpt", "run/epoch=2-step=40.ckpt"),
    ("logs/version_0/checkpoints/epoch=0-step=9.ckpt", "logs/version_0/checkpoints/epoch=1-step=20.ckpt"),
    ("run/checkpoint-9/global_step9/mp_rank_00.pt", "run/checkpoint-20/global_step20/mp_rank_00.pt"),
    ("run/step_9/rank_1/model.pt", "run/step_20/rank_1/model.pt"),
    ("run/9/rank_1/model.pt", "run/20/rank_1/model.pt"),
    ("run/model_step9_rank1.pt", "run/model_step20_rank1.pt"),
    ("model_00000001.pt", "model_00000002.pt"),
    ("run/1/0123456789abcdef.part", "run/2/fedcba9876543210.part"),
]


def test_saves_of_one_thing_belong_together():
    assert all(group_of(first) == group_of(second) for first, second in SAME)


@pytest.mark.parametrize(("first", "second"), SAME[:1] + SAME[-2:])
def test_the_save_before_is_found_by_its_path(flushing, training, first, second):
    base = flushing.save(first, training.file())
    flushing.save("run/step_1/other", b"something else " * 9_999)
    flushing.restart()
    rows = flushing.save(second, training.step().file())
    assert needs(rows)
    assert needs(rows) <= names(base)


def test_files_of_two_things_do_not():
    for first, second in [
        ("run/step_1/rank_0.pt", "run/step_1/rank_1.pt"),
        ("run/step_1/rank_0/m", "run/step_2/rank_1/m"),
        ("run/1/rank_0/m", "run/2/rank_1/m"),
        ("model_step1_rank0.pt", "model_step1_rank1.pt"),
        ("run/checkpoint-1/model-00001-of-00002.st", "run/checkpoint-2/model-00002-of-00002.st"),
        ("run/step_1/__0_0.distcp", "run/step_2/__1_0.distcp"),
        ("a/step_1/m", "b/step_1/m"),
        ("seed1/step_1/m", "seed2/step_1/m"),
    ]:
        assert group_of(first) != group_of(second), first


def test_a_conflict_leaves_no_keyframe(flushing, training):
    draft = flushing.draft("model", training.file())
    rows = flushing.upload(draft)
    save(flushing.store, "model", b"theirs")
    with pytest.raises(ConflictError):
        flushing.publish(draft, rows)
    later = flushing.save("model", training.step().file())
    assert not needs(later) & names(rows)


def test_chunks_without_context_are_counted_and_logged_once(flushing, training, caplog):
    for step in (1, 2):
        draft = flushing.draft(f"run/step_{step}/model", training.file())
        flushing.local.pop(draft.record.rows[0].name.digest)
        flushing.publisher.plan(draft, flushing)
    assert flushing.publisher.asked()["codecs"]["unknown_layouts"] == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "without knowledge of its tensors" in caplog.text


def lists_of(measured, save, count):
    """Return how many listings ``count`` files of one directory need, without those that open the store."""
    save(count)
    before = measured.snapshot()["list"]["requests"]
    for number in range(count):
        save(number)
    return measured.snapshot()["list"]["requests"] - before


def test_files_too_small_for_differences_look_for_no_parent(objects):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)
    assert lists_of(measured, lambda number: flushing.save(f"logs/event-{number}.json", b"{}" * (number + 1)), 20) == 0


def test_names_of_a_directory_are_listed_once_in_five_seconds(objects, training):
    measured = MeasuredObjects(objects)
    flushing = Flushing(measured)

    def save(number):
        flushing.clock.sleep(0.1)
        flushing.save(f"run/{uuid.UUID(int=number * 7919)}-part/shard_{number}_of_all.bin", training.step().file())

    assert lists_of(measured, save, 20) <= 2
    flushing.clock.sleep(6)
    assert lists_of(measured, save, 1) <= 1


def test_a_parent_that_another_host_published_is_found_when_the_names_are_listed_again(objects, training):
    here, there = Flushing(objects), Flushing(objects)
    here.save("other/step_1/shard.bin", training.file())
    first = there.save(path_of(1), training.file())
    here.clock.sleep(6)
    second = here.save(path_of(2), training.step().file())
    assert needs(second) <= names(first)
    assert needs(second)
