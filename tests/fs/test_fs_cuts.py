"""The stored size of a file that is written again, if most of its tensors did not change."""

import io
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import safetensors.torch

MIB = 1 << 20
LENGTHS = {"embed": 17 * MIB, "layer.a": 3 * MIB, "layer.b": 2 * MIB, "layer.norm": 3000, "layer.scale": 40, "z": MIB}


@pytest.fixture(scope="module")
def tensors():
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 31, 40 * MIB // 4, dtype=np.int32))
    ends = list(itertools.accumulate(length // 4 for length in LENGTHS.values()))
    return {name: noise[end - LENGTHS[name] // 4 : end].clone() for name, end in zip(LENGTHS, ends, strict=True)}


def torch_file(state, note):
    file = io.BytesIO()
    torch.save({"note": note, "state": state}, file)
    return file.getvalue()


def safetensors_file(state, note):
    return safetensors.torch.save(state, metadata={"note": note})


FORMATS = {"safetensors": safetensors_file, "torch.save": torch_file}


def write(fs, path, data, piece):
    with fs.open(path, "wb") as file:
        for at in range(0, len(data), piece):
            assert file.write(data[at : at + piece]) == len(data[at : at + piece])


def sizes(place):
    """Return the size of each chunk object."""
    return {key: place.store.objects.head(key).size for key in place.chunks()}


@pytest.mark.parametrize("piece", [MIB, 1 << 30])
@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_a_changed_tensor_and_header_cost_only_these(place, tensors, make, piece):
    first = make(tensors, "short")
    second = make({**tensors, "layer.a": tensors["layer.a"] + 1}, "longer " * 100)
    assert len(second) - len(first) > 600
    write(place.fs, place / "a", first, piece)
    before = sizes(place)
    write(place.fs, place / "b", second, piece)
    new = {key: size for key, size in sizes(place).items() if key not in before}
    # New chunks: the changed tensor and the header; in a file of torch.save, the tail as well.
    large = [size for size in new.values() if size >= MIB]
    assert len(large) == 1
    assert 2.5 * MIB < large[0] < 3 * MIB + 4096, "encoded or not"
    assert len(new) == (2 if make is safetensors_file else 3)
    assert sum(new.values()) - large[0] < 6000
    assert place.fs.cat_file(place / "a") == first
    assert place.fs.cat_file(place / "b") == second


def test_torch_and_safetensors_read_back_what_they_wrote(place, tensors, tmp_path):
    with place.fs.open(place / "model.pt", "wb") as file:
        torch.save(tensors, file)
    with place.fs.open(place / "model.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    place.fs.put_file(str(tmp_path / "model.safetensors"), place / "model.safetensors")
    loaded = safetensors.torch.load(place.fs.cat_file(place / "model.safetensors"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_put_file_has_the_chunks_of_a_written_one(place, tensors, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(tensors, "x"))
    place.fs.put_file(str(tmp_path / "model.safetensors"), place / "a")
    before = place.chunks()
    write(place.fs, place / "b", (tmp_path / "model.safetensors").read_bytes(), 7 * MIB)
    assert place.chunks() == before


@pytest.mark.parametrize("extra", [b"more", bytes(40 * MIB)])
def test_appended_bytes_follow_the_tensors_chunks(place, tensors, extra):
    data = safetensors_file(tensors, "x")
    write(place.fs, place / "a", data, MIB)
    before = place.chunks()
    with place.fs.open(place / "a", "ab") as file:
        file.write(extra)
    with place.fs.open(place / "a", "ab") as file:
        file.write(extra)
    assert place.fs.cat_file(place / "a") == data + extra + extra
    assert len(place.chunks() & before) == len(before)
    assert len(place.chunks() - before) <= 2 + 2 * len(extra) // (16 * MIB)


def test_a_file_grown_by_appending_is_cut_like_a_whole_one(place, tensors):
    data = safetensors_file(tensors, "x")
    begin = 8 + int.from_bytes(data[:8], "little")
    for end in (5, begin, begin + 100):
        with place.fs.open(place / "a", "ab") as file:
            file.write(data[file.tell() : end])
    with place.fs.open(place / "a", "ab") as file:
        file.write(data[file.tell() :])
    write(place.fs, place / "b", data, MIB)
    assert place.fs.cat_file(place / "a") == place.fs.cat_file(place / "b")
