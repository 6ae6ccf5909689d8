"""An export and import give the same bits. State that a format cannot hold is refused before the first write."""

import errno
import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from support.handmade import Handmade, pickled
from support.odd_states import DTYPES, noise, odd_state, same
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tierfs
from tierfs.checkpoint import export as exporting
from tierfs.checkpoint import import_ as importing
from tierfs.checkpoint.diff import compare
from tierfs.checkpoint.export import nested, safetensors_pieces, state_of, write_dcp, write_state
from tierfs.checkpoint.import_ import import_checkpoint, import_file
from tierfs.cli.app import main
from tierfs.cli.files.places import plain_store
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.load.boxes import boxes_of
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES, in_safetensors
from tierfs.dcp.torch_format.streams import problem_of
from tierfs.errors import AlreadyExistsError, CorruptionError, FormatError, InvalidInputError, NotFoundError, StoreError
from tierfs.session import parse_url
from tierfs.store import delete, load, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]
FILE = "rank-00000-0badcafe.safetensors"
KNOWN = [dtype for dtype in DTYPES if dtype in SAFETENSORS_NAMES]


@pytest.fixture(params=["tierfs", "dcp"])
def checkpoint(request, url, store):
    """A checkpoint of `odd_state`, once by each writer."""
    return write(url, store, request.param, odd_state())


def write(url, store, writer, state):
    place = f"tierfs::{url}/run/step_1"
    storage_writer = TierWriter(place, ack="object") if writer == "tierfs" else FsspecWriter(place)
    dcp.save(state, storage_writer=storage_writer, no_dist=True)
    return open_checkpoint(store, "run/step_1")


def plain(path):
    return open_checkpoint(*plain_store(parse_url(str(path))))


def zeros(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.numel() * value.dtype.itemsize, dtype=torch.uint8).view(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return {key: zeros(inner) for key, inner in value.items()}
    return list(map(zeros, value)) if isinstance(value, list) else None


def loaded(url, like):
    found = zeros(like)
    dcp.load(found, storage_reader=TierReader(url), planner=TierLoadPlanner(), no_dist=True)
    return found


# -- dcp ---------------------------------------------------------------------------------------------------------------


def test_a_dcp_directory_is_loaded_by_torchs_own_reader(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "BATCH_BYTES", 1 << 20)
    write_dcp(checkpoint, str(tmp_path))
    assert len(plain(tmp_path).shards("large")) == (3 if checkpoint.format == "tierfs" else 1)
    found = zeros(odd_state())
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert same(found, odd_state())
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp"]


@pytest.fixture
def in_parts_of(monkeypatch):
    """Set the bytes of a part of an import."""
    return lambda count: monkeypatch.setattr(importing, "PART_BYTES", count)


@pytest.mark.parametrize("part_bytes", [importing.PART_BYTES, 1000])
def test_a_dcp_directory_comes_back_bit_for_bit(checkpoint, url, store, tmp_path, in_parts_of, part_bytes):
    write_dcp(checkpoint, str(tmp_path))
    in_parts_of(part_bytes)
    import_checkpoint(plain(tmp_path), f"tierfs::{url}/back", overwrite=False)
    back = open_checkpoint(store, "back")
    assert (len(back.files()) > 3) == (part_bytes == 1000)
    assert compare(checkpoint, back).is_none
    assert back.metadata.planner_data == checkpoint.metadata.planner_data
    assert back.format == "tierfs"
    assert same(loaded(f"tierfs::{url}/back", odd_state()), odd_state())


def test_parts_are_imported_by_processes(tmp_path, monkeypatch, in_parts_of, capsys):
    source, target = tmp_path / "source", tmp_path / "store"
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")
    state = {f"t{number}": noise(torch.float32, (500, 100), number) for number in range(6)} | {"step": 3}
    dcp.save(state, checkpoint_id=source, no_dist=True)
    assert main(["init", str(target)]) == 0
    in_parts_of(400_000)
    url = f"tierfs::file://{target}/back"
    assert main(["checkpoint", "import", str(source), url, "--executor", "processes:1"]) == 0
    assert main(["checkpoint", "diff", str(source), url]) == 0
    assert len(open_checkpoint(*Address.of(url, {}).open()).files()) == 3
    assert main(["checkpoint", "import", str(source / ".metadata"), f"{url}2", "--executor", "processes:1"]) != 0
    assert "omit --executor" in capsys.readouterr().err


def test_a_part_that_fails_leaves_no_checkpoint(checkpoint, url, store, tmp_path, in_parts_of):
    write_dcp(checkpoint, str(tmp_path))
    in_parts_of(1000)

    def run_parts(parts):
        raise StoreError(f"{len(parts)} workers are lost")

    with pytest.raises(StoreError, match="workers are lost"):
        import_checkpoint(plain(tmp_path), f"tierfs::{url}/back", overwrite=False, run_parts=run_parts)
    with pytest.raises(NotFoundError):
        open_checkpoint(store, "back")


def test_properties_and_objects_nobody_could_load_come_back_as_they_were(url, store, tmp_path):
    class Own:
        pass

    globals()["Own"], Own.__qualname__ = Own, "Own"
    state = {"w": torch.nn.Parameter(torch.ones(3)), "own": Own(), "nested": {"list": [torch.ones(1), 2]}}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    import_checkpoint(plain(tmp_path / "plain"), f"tierfs::{url}/back", overwrite=False)
    back = open_checkpoint(store, "back")
    assert compare(plain(tmp_path / "plain"), back).is_none
    assert back.metadata.state_dict_metadata["w"].properties.requires_grad
    assert back.metadata.planner_data == plain(tmp_path / "plain").metadata.planner_data
    with pytest.raises(InvalidInputError, match="Own"):
        state_of(back)
    assert state_of(back, skip_objects=True).keys() == {"w", "nested"}


def test_skipped_objects_are_not_in_the_directory(checkpoint, tmp_path):
    write_dcp(checkpoint, str(tmp_path), skip_objects=True)
    assert plain(tmp_path).objects == {}
    found = {"scalar": torch.zeros(())}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert found["scalar"] == 2.5


# -- safetensors -------------------------------------------------------------------------------------------------------


def test_one_safetensors_file_holds_every_tensor_whole(url, store, tmp_path):
    state = odd_state(dtypes=KNOWN)
    checkpoint = write(url, store, "tierfs", state)
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"".join(safetensors_pieces(checkpoint, skip_objects=True)))
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    assert found.keys() == checkpoint.tensors.keys()
    assert all(same(found[f"model.{name}"], tensor) for name, tensor in state["model"].items())
    assert same(found["large"], state["large"])
    assert same(found["groups.1.lr"], state["groups"][1]["lr"])
    assert (found["scalar"].item(), tuple(found["empty"].shape)) == (2.5, (0, 7))


def test_shards_are_put_together(store):
    tensor = noise(torch.float32, (5, 8))
    made = Handmade(store, "run/1")
    made.tensor("w", tensor, {FILE: [((0, 0), (5, 3)), ((0, 3), (2, 5)), ((2, 3), (3, 5))]})
    made.save()
    from safetensors.torch import load as load_safetensors

    assert same(load_safetensors(b"".join(safetensors_pieces(open_checkpoint(store, "run/1")))), {"w": tensor})


def test_a_safetensors_file_comes_back_bit_for_bit(url, store, tmp_path):
    checkpoint = write(url, store, "tierfs", odd_state(dtypes=KNOWN))
    path = tmp_path / "out"
    path.write_bytes(b"".join(safetensors_pieces(checkpoint, skip_objects=True)))
    import_file(str(path), f"tierfs::{url}/back", where="out", overwrite=False)
    found = compare(checkpoint, open_checkpoint(store, "back"))
    assert found.only_a == sorted(checkpoint.objects)
    assert found.equal == len(checkpoint.tensors)
    import_file(path.read_bytes(), f"tierfs::{url}/again", where="out", overwrite=False)
    assert compare(open_checkpoint(store, "back"), open_checkpoint(store, "again")).is_none


def test_a_file_of_the_safetensors_library_is_imported(url, tmp_path):
    state = {"a.b": noise(torch.bfloat16, (3, 5)), "c": noise(torch.float8_e5m2, (7,)), "e": torch.empty(3, 0)}
    save_file(state, tmp_path / "out", metadata={"note": "x"})
    import_file(str(tmp_path / "out"), f"tierfs::{url}/back", where="out", overwrite=False)
    assert same(loaded(f"tierfs::{url}/back", state), state)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if in_safetensors(dtype, (3,)) is None], ids=str)
def test_a_dtype_that_the_format_lacks_is_refused_by_name(url, store, dtype):
    checkpoint = write(url, store, "tierfs", {"good": torch.ones(2), "odd": noise(dtype, (3,))})
    with pytest.raises(InvalidInputError, match=rf"'odd' \({str(dtype).removeprefix('torch.')}\)"):
        safetensors_pieces(checkpoint)


def test_objects_are_refused_by_name(url, store):
    checkpoint = write(url, store, "tierfs", {"good": torch.ones(2), "step": 3})
    with pytest.raises(InvalidInputError, match=r"'step'.*--skip-objects"):
        safetensors_pieces(checkpoint)
    checkpoint = write(url, store, "tierfs", {"__metadata__": torch.ones(2)})
    with pytest.raises(InvalidInputError, match="no tensor named"):
        safetensors_pieces(checkpoint)


# -- torch.save --------------------------------------------------------------------------------------------------------


def test_a_file_of_torch_save_is_the_nested_state(checkpoint, tmp_path):
    with open(tmp_path / "out.pt", "wb") as stream:
        write_state(state_of(checkpoint), stream)
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), odd_state())


def test_objects_that_weights_only_refuses_are_not_exported(url, store, tmp_path):
    with open(tmp_path / "out.pt", "wb") as stream:
        write_state(state_of(write(url, store, "tierfs", {"w": torch.ones(2), "some": b"thing"})), stream)
    assert torch.load(tmp_path / "out.pt", weights_only=True)["some"] == b"thing"
    with pytest.raises(InvalidInputError, match=r"'none'.*bytes.*--skip-objects"):
        state_of(write(url, store, "tierfs", {"w": torch.ones(2), "none": b""}))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_of_torch_save_comes_back_bit_for_bit(checkpoint, url, store, tmp_path, mapped):
    with open(tmp_path / "out.pt", "wb") as stream:
        write_state(state_of(checkpoint), stream)
    source = str(tmp_path / "out.pt") if mapped else (tmp_path / "out.pt").read_bytes()
    import_file(source, f"tierfs::{url}/back", where="out.pt", overwrite=False)
    assert compare(checkpoint, open_checkpoint(store, "back")).is_none


def test_an_old_file_of_torch_save_is_imported(url, tmp_path):
    state = {"w": torch.ones(3), "n": 1}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    import_file(str(tmp_path / "old.pt"), f"tierfs::{url}/back", where="old.pt", overwrite=False)
    assert same(loaded(f"tierfs::{url}/back", state), state)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_file_of_torch_save_that_was_compressed_is_imported(url, store, tmp_path, is_local):
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))  # deflate makes it longer
    with zipfile.ZipFile(io.BytesIO(pickled({"w": tensor}))) as archive:
        with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as compressed:
            for name in archive.namelist():
                compressed.writestr(name, archive.read(name))
    source = str(tmp_path / "small.pt") if is_local else (tmp_path / "small.pt").read_bytes()
    import_file(source, f"tierfs::{url}/back", where="small.pt", overwrite=False)
    assert torch.equal(state_of(open_checkpoint(store, "back"))["w"], tensor)


class _Calls:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w')",))


def test_a_pickle_with_code_is_refused_and_runs_nothing(url, store, tmp_path):
    evil = _Calls(tmp_path / "ran")
    torch.save({"w": torch.ones(1), "x": evil}, tmp_path / "new.pt")
    torch.save({"w": torch.ones(1), "x": evil}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(evil))
    for name in ("new.pt", "old.pt", "bare.pt"):
        with pytest.raises(InvalidInputError, match=re.escape(str(tmp_path / name))):
            import_file(str(tmp_path / name), f"tierfs::{url}/back", where=str(tmp_path / name), overwrite=False)
    made = Handmade(store, "run/1")
    made.tensor("w", torch.ones(1), FILE)
    made.object("x", pickled(evil), FILE)
    made.save()
    with pytest.raises(InvalidInputError, match=r"exec.*--skip-objects"):
        state_of(open_checkpoint(store, "run/1"))
    write_dcp(open_checkpoint(store, "run/1"), str(tmp_path / "."))
    import_checkpoint(plain(tmp_path), f"tierfs::{url}/through", overwrite=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(tierfs.TierfsError):
        open_checkpoint(store, "back")


class _Full(io.BytesIO):
    """A stream that raises ENOSPC after `room` bytes."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def write(self, data):
        self.room -= len(memoryview(data).cast("B"))
        if self.room < 0:
            raise OSError(errno.ENOSPC, "full")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 700, 100_000, 2_900_000])
def test_a_full_disk_is_told_as_what_it_is(room):
    with pytest.raises(OSError, match="full") as caught:
        write_state(
            {"w": torch.ones(10), "large": noise(torch.float32, (700, 1000)), "z": torch.ones(50_000)}, _Full(room)
        )
    assert caught.value.errno == errno.ENOSPC


# -- invalid files -----------------------------------------------------------------------------------------------------


def table(entries, data=b"\0" * 16):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", InvalidInputError),
        (b"nonsense", InvalidInputError),
        (b"\x80", InvalidInputError),
        (b"PK\x03\x04nonsense", CorruptionError),
        (table({"w": entry()})[:-1], CorruptionError),
        ((1 << 62).to_bytes(8, "little") + b"{}", CorruptionError),
        (table({"w": entry(shape=(5,))}), CorruptionError),
        (table({"w": entry(offsets=(0, 2**62))}), CorruptionError),
        (table({"w": entry(offsets=(16, 0))}), CorruptionError),
        (table({"w": entry(shape=(-4,))}), CorruptionError),
        (table({"w": entry(shape=[1] * 100)}), CorruptionError),
        (table({"w": entry(), "v": entry()}), CorruptionError),
        (table({"w": entry(shape=(2,), offsets=(0, 8)), "v": entry(shape=(1,), offsets=(12, 16))}), CorruptionError),
        (table({"w": {"dtype": "F32"}}), CorruptionError),
        (table({"w": 3}), CorruptionError),
        (
            table(b'{"w":' + json.dumps(entry()).encode() + b',"w":' + json.dumps(entry()).encode() + b"}"),
            CorruptionError,
        ),
        (table(b"{" * 100_000), CorruptionError),
        (table({"w": entry(dtype="F6_E3M2", shape=(16,))}), FormatError),
        (table({"w": entry(dtype=["F32"])}), CorruptionError),
        (table({"w": entry(shape=(0, 2**62, 8), offsets=(0, 0))}, b""), CorruptionError),
        (table({"w": entry(dtype="U8", shape=(), offsets=(0, 1)) | {"shape": {}}}, bytes(1)), CorruptionError),
    ],
    ids=range(21),
)
def test_a_file_that_is_no_good_is_refused_and_imports_nothing(url, store, content, error):
    with pytest.raises(error, match="bad file"):
        import_file(content, f"tierfs::{url}/back", where="bad file", overwrite=False)
    with pytest.raises(tierfs.TierfsError):
        open_checkpoint(store, "back")


def flipped(data, where):
    data = bytearray(data)
    data[data.index(where) + len(where) // 2] ^= 64
    return bytes(data)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_flipped_bit_in_a_file_of_torch_save_is_not_taken_in(url, store, tmp_path, mapped):
    tensor = torch.arange(1000.0)
    content = flipped(pickled({"w": tensor}), tensor.numpy().tobytes())
    (tmp_path / "bad file").write_bytes(content)
    source = str(tmp_path / "bad file") if mapped else content
    with pytest.raises(CorruptionError, match="bad file is damaged"):
        import_file(source, f"tierfs::{url}/back", where="bad file", overwrite=False)
    with pytest.raises(tierfs.TierfsError):
        open_checkpoint(store, "back")


@pytest.mark.parametrize("what", ["tensor", "object"])
def test_a_flipped_bit_in_a_stock_directory_goes_nowhere(url, store, tmp_path, what):
    state = {"w": torch.arange(1000.0), "name": "abcdefgh" * 8}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    file = tmp_path / "plain" / "__0_0.distcp"
    file.write_bytes(flipped(file.read_bytes(), state["w"].numpy().tobytes() if what == "tensor" else b"abcdefgh" * 8))
    source = plain(tmp_path / "plain")
    with pytest.raises(CorruptionError, match=r"'(w|name)' in shard file .*__0_0\.distcp: damaged"):
        import_checkpoint(source, f"tierfs::{url}/back", overwrite=False)
    with pytest.raises(CorruptionError, match="damaged"):
        state_of(source)


@pytest.mark.parametrize("length", [-1, 2000, 100, 0])
def test_a_stock_directory_that_was_cut_short_goes_nowhere(url, tmp_path, length):
    dcp.save({"w": torch.arange(3000.0)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    file = tmp_path / "plain" / "__0_0.distcp"
    os.truncate(file, length % file.stat().st_size)
    source = plain(tmp_path / "plain")
    told = r"'w'.* shard file .*__0_0\.distcp"
    with pytest.raises(CorruptionError, match=told):
        import_checkpoint(source, f"tierfs::{url}/back", overwrite=False)
    with pytest.raises(CorruptionError, match=told):
        state_of(source)
    with pytest.raises(CorruptionError, match=told):
        compare(source, source)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_damage_at_an_archives_end_is_explained(tmp_path, byte):
    content = pickled({"w": torch.arange(300.0), "x": "y" * 100})
    told = 0
    for at in range(1, 400):
        damaged = bytearray(content)
        damaged[-at] = byte
        (tmp_path / "file").write_bytes(damaged)
        with open(tmp_path / "file", "rb") as file:
            problems = {problem_of(file) is None, problem_of(io.BytesIO(damaged)) is None}
        assert len(problems) == 1
        told += problems == {False}
    assert told > 100


def test_archives_without_checksums_are_accepted(url, store, without_checksums):
    content = pickled({"w": torch.arange(10.0)})
    import_file(content, f"tierfs::{url}/back", where="file", overwrite=False)
    assert torch.equal(state_of(open_checkpoint(store, "back"))["w"], torch.arange(10.0))


def test_empty_containers_come_back(url, store):
    model = torch.nn.Linear(2, 2)
    state = {
        "optimizer": torch.optim.SGD(model.parameters()).state_dict(),
        "nested": {"a": {"b": {}}, "list": [{}, torch.ones(1), {"c": {}}], "plain": [{}, [], 1], "tuple": ({}, ())},
        "ordered": OrderedDict(),
    }
    import_file(pickled(state), f"tierfs::{url}/back", where="file", overwrite=False)
    back = state_of(open_checkpoint(store, "back"))
    assert same(back, state)
    torch.optim.SGD(model.parameters()).load_state_dict(back["optimizer"])


@pytest.mark.parametrize(
    "value",
    [
        [{}],
        [{}, 1],
        [[{}], 1],
        [{"x": {}}],
        [{"x": 1}, {}],
        [torch.ones(1), {}],
        [[torch.ones(1)], [{}], {}],
        {"x": [{"y": [{}]}]},
    ],
    ids=str,
)
def test_empty_mappings_in_lists_pass_through_a_directory_of_torchs_own(url, store, tmp_path, value):
    state = {"w": torch.ones(2), "value": value}
    import_file(pickled(state), f"tierfs::{url}/back", where="file", overwrite=False)
    checkpoint = open_checkpoint(store, "back")
    assert same(state_of(checkpoint), state)
    write_dcp(checkpoint, str(tmp_path))
    dcp_to_torch_save(tmp_path, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state)


def test_an_empty_mapping_that_is_called_as_another_value_is_refused(url):
    for value in ({}, [{}]):
        with pytest.raises(InvalidInputError, match=r"'a\.b'"):
            import_file(
                pickled({"a.b": torch.ones(1), "a": {"b": value}}), f"tierfs::{url}/x", where="f", overwrite=False
            )


@pytest.mark.parametrize("value", [torch.ones(3), [1, 2], 3], ids=["tensor", "list", "number"])
def test_a_file_that_is_no_state_dict_is_refused(url, value):
    with pytest.raises(InvalidInputError, match="put it into a dict"):
        import_file(pickled(value), f"tierfs::{url}/back", where="file", overwrite=False)


def test_keys_that_become_one_are_refused(url):
    with pytest.raises(InvalidInputError, match="cannot be saved"):
        import_file(
            pickled({"a": {"0": torch.ones(1), 0: torch.ones(1)}}), f"tierfs::{url}/x", where="f", overwrite=False
        )


def test_a_checkpoint_is_replaced_only_if_it_may_be(url, store):
    import_file(pickled({"w": torch.ones(1)}), f"tierfs::{url}/back", where="file", overwrite=False)
    with pytest.raises(AlreadyExistsError):
        import_file(pickled({"w": torch.zeros(1)}), f"tierfs::{url}/back", where="file", overwrite=False)
    assert state_of(open_checkpoint(store, "back"))["w"] == 1
    import_file(pickled({"w": torch.zeros(1)}), f"tierfs::{url}/back", where="file", overwrite=True)
    assert state_of(open_checkpoint(store, "back"))["w"] == 0


def test_an_incomplete_tensor_is_refused_by_every_format(store, tmp_path):
    made = Handmade(store, "run/1")
    made.tensor("w", torch.ones(4), {FILE: [((0,), (3,))]})
    made.save()
    checkpoint = open_checkpoint(store, "run/1")
    for attempt in (
        lambda: safetensors_pieces(checkpoint),
        lambda: state_of(checkpoint),
        lambda: write_dcp(checkpoint, str(tmp_path)),
        lambda: import_checkpoint(checkpoint, "memory://nowhere/x", overwrite=False),
    ):
        with pytest.raises(CorruptionError, match="1 of its elements are in no shard"):
            attempt()
    assert os.listdir(tmp_path) == []


def test_a_part_of_a_tensor_that_one_rank_saved_is_no_damage_but_cannot_go(store):
    made = Handmade(store, "run/1")
    made.tensor("w", torch.ones(4), {FILE: [((0,), (3,))]})
    made.save("__1.metadata")
    with pytest.raises(InvalidInputError, match="rank 1 saved only its own part"):
        safetensors_pieces(open_checkpoint(store, "run/1", rank=1))


def test_a_missing_shard_file_is_damage_and_costs_no_memory(store):
    made = Handmade(store, "run/1")
    made.tensor("w", torch.ones(4), FILE)
    made.save()
    delete(store, f"run/1/{FILE}")
    with pytest.raises(CorruptionError, match="missing"):
        state_of(open_checkpoint(store, "run/1"))


def test_a_tensor_larger_than_its_stock_file_is_refused_before_memory_is_taken(url, store):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=f"tierfs::{url}/run/1", no_dist=True)
    data = load(store, "run/1/.metadata")
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    metadata = pickle.loads(data)
    item = metadata.state_dict_metadata["w"]
    item.size = torch.Size((2**50,))
    item.chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((2**50,)))]
    save(store, "run/1/.metadata", pickle.dumps(metadata))
    checkpoint = open_checkpoint(store, "run/1")
    with pytest.raises(CorruptionError, match=r"is too short for \d+ bytes"):
        state_of(checkpoint)


@pytest.mark.parametrize("name", ["../other/secret", "/etc/passwd", "a/b", "..", ".metadata"])
def test_a_stock_checkpoint_that_names_files_elsewhere_is_refused(url, store, name):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=f"tierfs::{url}/run/1", no_dist=True)
    metadata = pickle.loads(load(store, "run/1/.metadata"))
    for info in metadata.storage_data.values():
        info.relative_path = name
    save(store, "run/1/.metadata", pickle.dumps(metadata))
    with pytest.raises(CorruptionError, match="not a valid file name"):
        open_checkpoint(store, "run/1")


def test_boxes_of_an_archive_are_whole(url, store):
    dcp.save({"w": torch.ones(400)}, checkpoint_id=f"tierfs::{url}/run/1", no_dist=True)
    (box,) = boxes_of(open_checkpoint(store, "run/1"), "w", bytes_max=100)
    assert box.sizes == (400,)


# -- the nested state --------------------------------------------------------------------------------------------------


def test_strings_are_keys_and_integers_places():
    paths = {"a.b": ("a", "b"), "l.0": ("l", 0), "l.1.x": ("l", 1, "x"), "m.0": ("m", "0")}
    assert nested(dict.fromkeys(paths, 1), paths) == {"a": {"b": 1}, "l": [1, {"x": 1}], "m": {"0": 1}}


def test_without_paths_names_are_kept():
    assert nested({"a.b": 1, "c": 2}, None) == {"a.b": 1, "c": 2}
    assert nested({"a.b": 1, "c": 2}, {"c": ("x", "y")}) == {"a.b": 1, "x": {"y": 2}}


def test_values_that_are_containers_are_left_alone():
    assert nested({"a": {}, "b": [{0: 1}]}, None) == {"a": {}, "b": [{0: 1}]}


def test_a_place_far_out_makes_no_long_list():
    assert nested({"l": 1}, {"l": ("l", 10**15)}) == {"l": {10**15: 1}}
    assert nested({"a": 1, "b": 2}, {"a": ("l", 0), "b": ("l", 2)}) == {"l": {0: 1, 2: 2}}
    assert nested({"l": 1}, {"l": ("l", -1)}) == {"l": {-1: 1}}


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", "y"), "b": ("x",)},
        {"a": ("b",)},
    ],
    ids=str,
)
def test_paths_that_contradict_each_other_are_refused(paths):
    with pytest.raises(InvalidInputError, match="another value"):
        nested({"a": 1, "b": 2}, paths)
