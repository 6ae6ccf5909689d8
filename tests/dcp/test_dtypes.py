"""Every dtype of torch is saved, loaded, exported and imported unchanged, or refused by name. None ends the process."""

import io
import json
import struct
from functools import partial

import pytest
from support.forked import answer_of

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.checkpoint.export import safetensors_pieces, state_of
from tierfs.checkpoint.import_ import import_file
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.tensorbytes import DTYPES, in_safetensors, in_torch
from tierfs.errors import CorruptionError, FormatError, InvalidInputError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]
QUANTIZED = [name for name in DTYPES if name.startswith(("qint", "quint"))]
UNPLANNED = [name for name in DTYPES if name.startswith("bits") or name.strip("uint") in set("1234567")]
PLAIN = [name for name in DTYPES if name not in {*QUANTIZED, *UNPLANNED}]
IN_SAFETENSORS = {
    "float4_e2m1fn_x2": ("F4", [4, 32]),
    "float8_e8m0fnu": ("F8_E8M0", [4, 16]),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", [4, 16]),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", [4, 16]),
    "complex64": ("C64", [4, 2]),
}


@pytest.fixture
def where(url):
    return f"tierfs::{url}/run"


def view(name):
    """Return four rows of 16 bytes as this dtype."""
    dtype = DTYPES[name]
    raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16) % 2
    return raw.view(dtype) if dtype.itemsize < 16 else raw.flatten().view(dtype).reshape(4, 1)


def content(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def opened(where):
    return open_checkpoint(*Address.of(where, {}).open())


def failure(call):
    with pytest.raises((CheckpointException, InvalidInputError)) as raised:
        call()
    error = raised.value
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _saved_later(state, writer):
    return dcp.async_save(state, storage_writer=writer).result()


def outcome(work):
    """Return the result or error of `work` as text. The work runs in a child, since it may end the process."""

    def said():
        try:
            return work()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    return answer_of(said)


@pytest.mark.parametrize("name", PLAIN)
def test_a_dtype_comes_back_and_goes_through_files(where, name):
    tensor = view(name)
    dcp.save({"w": tensor, "part": tensor[1:3], "none": tensor[:0]}, storage_writer=TierWriter(where))
    found = {
        "w": torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
        if tensor.dtype.itemsize == 1
        else torch.empty_like(tensor)
    }
    dcp.load(found, storage_reader=TierReader(where))
    assert content(found["w"]) == content(tensor)
    state = state_of(opened(where))
    assert content(state["w"]) == content(tensor)
    stream = io.BytesIO()
    torch.save(state, stream)
    import_file(stream.getvalue(), f"{where}-torch", where="file", overwrite=False)
    assert content(state_of(opened(f"{where}-torch"))["part"]) == content(tensor[1:3])
    if in_safetensors(tensor.dtype, tensor.shape) is None:
        with pytest.raises(InvalidInputError, match=rf"has no dtype for 'none' \({name}\)"):
            next(safetensors_pieces(opened(where)))
        return
    file = b"".join(map(bytes, safetensors_pieces(opened(where))))
    import_file(file, f"{where}-safe", where="file", overwrite=False)
    state = state_of(opened(f"{where}-safe"))
    assert (state["w"].dtype, state["w"].shape, content(state["w"])) == (tensor.dtype, tensor.shape, content(tensor))
    assert state["none"].shape == tensor[:0].shape


@pytest.mark.parametrize("name", IN_SAFETENSORS)
def test_the_library_reads_what_is_exported_and_the_other_way_round(where, tmp_path, name):
    tensor = view(name)
    dcp.save({"w": tensor}, storage_writer=TierWriter(where))
    file = b"".join(map(bytes, safetensors_pieces(opened(where))))
    table = json.loads(file[8 : 8 + struct.unpack("<Q", file[:8])[0]])
    assert (table["w"]["dtype"], table["w"]["shape"]) == IN_SAFETENSORS[name]
    library = pytest.importorskip("safetensors")
    from safetensors.torch import save

    try:
        written = save({"w": tensor})
    except KeyError:
        pytest.skip(f"safetensors {library.__version__} does not know {name}")
    (tmp_path / "file").write_bytes(file)
    with library.safe_open(tmp_path / "file", "pt") as opened_file:
        read = opened_file.get_tensor("w")
    assert (read.dtype, read.shape, content(read)) == (tensor.dtype, tensor.shape, content(tensor))
    import_file(written, f"{where}-2", where="file", overwrite=False)
    assert content(state_of(opened(f"{where}-2"))["w"]) == content(tensor)


def safetensors(dtype, shape, length):
    text = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, length]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(length)


@pytest.mark.parametrize(
    ("dtype", "shape", "length", "error"),
    [
        ("F4", [3], 2, FormatError),
        ("F4", [], 1, FormatError),
        ("F4", [2, 4], 3, CorruptionError),
        ("F4", [2, 4], 5, CorruptionError),
        ("F6_E2M3", [4], 3, FormatError),
        ("F6_E3M2", [4], 3, FormatError),
        ("F8_E8M0", [4], 3, CorruptionError),
        ("I4", [4], 2, FormatError),
        ("", [4], 2, FormatError),
    ],
)
def test_a_dtype_without_tensors_is_refused_by_name(where, dtype, shape, length, error):
    with pytest.raises(error, match="'w'"):
        import_file(safetensors(dtype, shape, length), where, where="file", overwrite=False)


def test_shapes_are_those_of_the_library():
    assert in_torch("F4", (2, 6)) == (torch.float4_e2m1fn_x2, (2, 3))
    assert in_torch("F4", (2, 0)) == (torch.float4_e2m1fn_x2, (2, 0))
    assert in_safetensors(torch.float4_e2m1fn_x2, ()) is None


@pytest.mark.parametrize("name", UNPLANNED)
def test_a_dtype_that_torch_cannot_plan_is_refused_by_name(where, name):
    tensor = view(name)
    for call in (
        lambda: dcp.save({"w": tensor}, storage_writer=TierWriter(where)),
        lambda: dcp.async_save({"w": tensor}, storage_writer=TierWriter(where)).result(),
    ):
        error = failure(call)
        assert isinstance(error, InvalidInputError)
        assert f"'w' is {tensor.dtype}" in str(error)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_view_as_a_quantized_dtype_is_refused(url, name):
    tensor = torch.arange(64, dtype=torch.uint8).view(DTYPES[name])

    def work():
        texts = []
        for part in (tensor, tensor[2:6], tensor[:0], tensor.reshape(2, -1).t()):
            writer = TierWriter(f"tierfs::{url}/run")
            save = partial(dcp.save, {"w": part}, storage_writer=writer)
            later = partial(_saved_later, {"w": part}, writer)
            for call in (save, later):
                error = failure(call)
                assert isinstance(error, InvalidInputError), repr(error)
                assert "'w'" in str(error)
                texts.append(str(error))
        return "refused" if all("quint" in text or "qint" in text for text in texts) else texts

    assert outcome(work) == "refused"


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_view_as_a_quantized_dtype_is_no_destination(url, where, name):
    raw = torch.arange(64, dtype=torch.uint8)
    dcp.save({"w": raw[: raw.view(DTYPES[name]).numel()]}, storage_writer=TierWriter(where))
    target = torch.zeros(64, dtype=torch.uint8).view(DTYPES[name])
    said = outcome(lambda: failure(lambda: dcp.load({"w": target}, storage_reader=TierReader(where))))
    assert "view with dtype torch.q" in said, said
