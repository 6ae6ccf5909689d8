"""Verify reads a whole checkpoint, and names the tensors, file and tier of each damage."""

import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import Handmade, pickled
from support.held_store import held_store
from support.odd_states import noise, odd_state

import tierfs
from tierfs.checkpoint.verify import verify_checkpoint
from tierfs.cli.files.places import plain_store
from tierfs.dcp import TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.columns import BytesPlace
from tierfs.format.keys import chunk_key, record_key
from tierfs.session import parse_url
from tierfs.store import Store, delete, load, save, stat
from tierfs.testing import flip_bit, remove

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]
MIB = 1 << 20
FILES = [f"rank-{rank:05d}-0badcafe.safetensors" for rank in range(3)]


def rows_of(store, path):
    return stat(store, path).manifest.rows


def check(store, directory="run/1", **options):
    return verify_checkpoint(open_checkpoint(store, directory), **options)


def made(store, directory="run/1"):
    made = Handmade(store, directory)
    made.tensor("small", torch.arange(6.0), FILES[0])
    made.tensor("w", noise(torch.float32, (9, MIB)), {FILES[0]: [((0, 0), (4, MIB))], FILES[1]: [((4, 0), (5, MIB))]})
    made.object("step", pickled(3), FILES[1])
    return made


def test_a_sound_checkpoint_of_everything_passes(url, store):
    dcp.save(odd_state(), storage_writer=TierWriter(f"tierfs::{url}/run/1", ack="object"), no_dist=True)
    dcp.save(odd_state(), checkpoint_id=f"tierfs::{url}/run/2", no_dist=True)
    for directory in ("run/1", "run/2"):
        seen = []
        report = check(store, directory, progress=seen.append)
        assert report.damage == []
        assert report.undigested == []
        assert report.length == sum(seen) == sum(open_checkpoint(store, directory).files().values())
        assert (report.files, report.objects) == (1, 3)
        assert report.tensors > 20


def test_a_damaged_chunk_is_named_by_the_tensors_that_lie_in_it(store):
    checkpoint = made(store)
    checkpoint.tensor("bias", torch.arange(6.0), FILES[1])
    checkpoint.save()
    damaged = rows_of(store, f"run/1/{FILES[1]}")[-1]
    flip_bit(store.objects, chunk_key(damaged.name), 8 * (damaged.stored_length - 100))
    report = check(store)
    (damage,) = report.damage
    assert damage.names == ("bias", "step")
    assert (damage.file, damage.tier, damage.kind) == (FILES[1], "object", "corruption")
    assert damage.at + damage.length == open_checkpoint(store, "run/1").files()[FILES[1]]
    assert report.files == 2


def test_one_damaged_block_concerns_what_lies_in_it(store):
    checkpoint = Handmade(store, "run/1")
    for number in range(6):
        checkpoint.tensor(f"w{number}", noise(torch.float32, (3 * MIB // 16,)), FILES[0])
    checkpoint.save()
    damaged = rows_of(store, f"run/1/{FILES[0]}")[-1]
    assert damaged.raw_length > 4 * MIB
    flip_bit(store.objects, chunk_key(damaged.name), 8 * (damaged.stored_length - 100))
    (damage,) = check(store).damage
    assert damage.names == ("w5",)
    assert damage.length < MIB


def test_missing_chunks_in_front_concern_what_lies_there(store):
    made(store).save()
    header, small, *_ = rows_of(store, f"run/1/{FILES[0]}")
    for row in (header, small):
        remove(store.objects, chunk_key(row.name))
    damages = check(store).damage
    assert [(damage.names, damage.at) for damage in damages] == [((), 0), (("small",), header.raw_length)]


def test_a_missing_file_one_of_another_length_and_a_damaged_record_are_found(store):
    made(store, "run/1").save()
    delete(store, f"run/1/{FILES[0]}")
    (damage,) = check(store, "run/1").damage
    assert (damage.names, damage.file) == (("small", "w"), FILES[0])
    assert "missing" in damage.problem
    made(store, "run/2").save()
    save(store, f"run/2/{FILES[1]}", b"short")
    (damage,) = check(store, "run/2").damage
    assert (damage.names, damage.file) == (("step", "w"), FILES[1])
    made(store, "run/3").save()
    flip_bit(store.objects, record_key(f"run/3/{FILES[1]}"), 100)
    report = check(store, "run/3")
    (damage,) = report.damage
    assert (damage.names, damage.file, damage.kind, report.files) == (("step", "w"), FILES[1], "corruption", 1)


def test_a_good_copy_on_this_host_does_not_hide_a_damaged_object(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    url, options = f"tierfs::file://{tmp_path}/store/run/1", {"ack": "object", "ram": "64MiB", "nvme": "0"}
    dcp.save({"w": noise(torch.float32, (300, 1000))}, storage_writer=TierWriter(url, **options), no_dist=True)
    store, _ = Address.of(url, dict(options)).open()
    (file,) = open_checkpoint(store, "run/1").files()
    row = rows_of(store, f"run/1/{file}")[-1]
    bare = Store(store.objects, store.descriptor, url=store.url)
    load(store, f"run/1/{file}")
    flip_bit(store.objects, chunk_key(row.name), 8 * (row.stored_length - 100))
    assert len(load(store, f"run/1/{file}")) > 1000
    (damage,) = check(store).damage
    assert (damage.names, damage.tier) == (("w",), "object")
    assert check(bare).damage == [damage]


def test_pending_checkpoints_are_verified_locally(tmp_path):
    with held_store(tmp_path) as store:
        checkpoint = Handmade(store, "run/1")
        checkpoint.tensor("w", noise(torch.float32, (300, 1000)), FILES[0])
        checkpoint.save()
        report = check(store)
        assert (report.damage, report.files) == ([], 1)


# -- metadata that contradicts the shard files -------------------------------------------------------------------------


def saying(store, change):
    """Save a checkpoint whose metadata `change` alters but keeps well-formed. Return the damage found."""
    checkpoint = made(store)
    honest = checkpoint.metadata
    checkpoint.metadata = lambda starts: change(honest(starts))
    checkpoint.save()
    return check(store).damage


def moved(metadata, fqn, by, length=None):
    for index, place in metadata.storage_data.items():
        if index.fqn == fqn:
            metadata.storage_data[index] = BytesPlace(
                place.file, place.at + by, place.length if length is None else length
            )
    return metadata


def test_a_tensor_that_is_said_to_lie_where_another_one_begins_is_found(store):
    (damage,) = saying(store, lambda metadata: moved(metadata, "small", 4))
    assert damage.names == ("small",)
    assert "not in any tensor of the shard file" in damage.problem


def test_a_tensor_that_is_said_to_lie_in_the_header_is_found(store):
    (damage,) = saying(store, lambda metadata: moved(metadata, "small", -16))
    assert (damage.names, damage.file) == (("small",), FILES[0])


def test_another_dtype_than_that_of_the_shard_file_is_found(store):
    def change(metadata):
        metadata.state_dict_metadata["small"].properties.dtype = torch.int32
        return metadata

    (damage,) = saying(store, change)
    assert damage.names == ("small",)
    assert "table says F32" in damage.problem


def test_another_shape_than_that_of_the_shard_file_is_found(store):
    def change(metadata):
        item = metadata.state_dict_metadata["small"]
        item.size = torch.Size((2, 3))
        (place,) = [metadata.storage_data.pop(index) for index in list(metadata.storage_data) if index.fqn == "small"]
        chunk = item.chunks[0]
        item.chunks[0] = type(chunk)(torch.Size((0, 0)), torch.Size((2, 3)))
        from torch.distributed.checkpoint.metadata import MetadataIndex

        metadata.storage_data[MetadataIndex("small", torch.Size((0, 0)))] = place
        return metadata

    (damage,) = saying(store, change)
    assert damage.names == ("small",)
    assert "table says [6]" in damage.problem


def test_shards_that_overlap_are_found(store):
    checkpoint = Handmade(store, "run/1")
    checkpoint.tensor("w", torch.ones(4, 2), {FILES[0]: [((0, 0), (3, 2)), ((2, 0), (2, 2))]})
    checkpoint.save()
    (damage,) = check(store).damage
    assert (damage.names, damage.file) == (("w",), "")
    assert "overlap" in damage.problem


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x40" + bytes(7) + b"{}"], ids=range(4)
)
def test_a_file_that_is_no_safetensors_file_is_found(store, content):
    checkpoint = Handmade(store, "run/1")
    checkpoint.tensor("w", torch.ones(400), FILES[0])
    checkpoint.save()
    length = open_checkpoint(store, "run/1").files()[FILES[0]]
    save(store, f"run/1/{FILES[0]}", content.ljust(length, b"\0"))
    (damage,) = check(store).damage
    assert damage.file == FILES[0]
    assert "not a safetensors file" in damage.problem


# -- plain directories written by torch's own writers ------------------------------------------------------------------


def plain(directory):
    store, path = plain_store(parse_url(str(directory)))
    return verify_checkpoint(open_checkpoint(store, path))


def test_a_sound_plain_directory_is_checked_as_far_as_can_be(tmp_path):
    dcp.save(odd_state(), checkpoint_id=tmp_path / "plain", no_dist=True)
    report = plain(tmp_path / "plain")
    assert (report.damage, report.undigested) == ([], ["__0_0.distcp"])


def test_a_bit_that_flipped_in_a_plain_directory_is_found_by_the_archives_checksum(tmp_path):
    dcp.save({"w": torch.ones(100_000), "v": torch.zeros(100_000)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    store, path = plain_store(parse_url(str(tmp_path / "plain")))
    checkpoint = open_checkpoint(store, path)
    (shard,) = checkpoint.shards("v")
    with open(tmp_path / "plain" / shard.place.file, "r+b") as file:
        file.seek(shard.place.at + shard.place.length // 2)
        file.write(b"\x01")
    report = plain(tmp_path / "plain")
    assert [damage.names for damage in report.damage] == [("v",)]


def test_a_bit_that_flipped_in_an_object_of_a_plain_directory_is_found(tmp_path):
    dcp.save({"w": torch.ones(10), "name": "abcdefgh"}, checkpoint_id=tmp_path / "plain", no_dist=True)
    file = tmp_path / "plain" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"abcdefgh", b"abcdefgi"))
    assert [damage.names for damage in plain(tmp_path / "plain").damage] == [("name",)]


def test_a_plain_directory_that_was_written_without_checksums_is_no_damage(tmp_path, without_checksums):
    dcp.save({"w": torch.ones(10), "name": "abcdefgh"}, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert not plain(tmp_path / "plain").damage


def test_a_pickle_with_code_where_a_tensor_is_to_be_runs_nothing(tmp_path):
    class Calls:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    dcp.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    file = tmp_path / "plain" / "__0_0.distcp"
    original = file.read_bytes()
    evil = pickled(Calls())
    file.write_bytes(evil.ljust(len(original), b"\0"))
    (damage,) = plain(tmp_path / "plain").damage
    assert damage.names == ("w",)
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(Calls()))
    with pytest.raises(tierfs.TierfsError, match="nothing was run"):
        plain(tmp_path / "plain")
    assert not (tmp_path / "ran").exists()
