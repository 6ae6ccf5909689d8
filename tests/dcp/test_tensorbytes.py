"""Tensors as bytes and back."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tierfs.dcp.tensorbytes import DTYPES, SAFETENSORS_NAMES, bytes_of, tensor_in, writable_bytes
from tierfs.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning")
PLAIN = sorted(name for name in DTYPES if not name.startswith(("qint", "quint")))


def filled(dtype, shape):
    length = torch.Size(shape).numel() * dtype.itemsize
    return tensor_in(
        bytearray(index * 7 % 2 if dtype == torch.bool else index * 7 % 256 for index in range(length)), dtype, shape
    )


def is_view(view, tensor):
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", PLAIN)
def test_every_dtype_and_shape_is_its_own_memory_and_comes_back(name):
    for shape in ((), (0,), (3, 5), (2, 0, 3)):
        tensor = filled(DTYPES[name], shape)
        content = bytes_of(tensor)
        assert content.nbytes == tensor.numel() * tensor.dtype.itemsize
        back = tensor_in(bytearray(content), tensor.dtype, shape)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(back) == content
        if content.nbytes:
            assert is_view(content, tensor)
            assert is_view(writable_bytes(tensor), tensor)


@pytest.mark.parametrize("name", PLAIN)
def test_a_transposed_tensor_gives_the_bytes_of_its_contiguous_copy(name):
    tensor = filled(DTYPES[name], (3, 4))
    size = tensor.dtype.itemsize
    raw = bytes(bytes_of(tensor))
    expected = b"".join(raw[(row * 4 + column) * size :][:size] for column in range(4) for row in range(3))
    assert bytes_of(tensor.t()) == expected
    assert writable_bytes(tensor.t()) is None


def test_conjugated_and_negated_views_give_what_they_show():
    tensor = torch.randn(4, dtype=torch.complex64)
    assert bytes_of(tensor.conj()) == bytes_of(tensor.conj().resolve_conj())
    negated = tensor.conj().imag
    assert negated.is_neg()
    assert bytes_of(negated) == bytes_of(negated.resolve_neg())
    assert writable_bytes(tensor.conj()) is None
    assert writable_bytes(negated) is None


def test_a_slice_of_a_big_tensor_costs_a_copy_of_the_slice_alone():
    tensor = torch.arange(100, dtype=torch.int64)
    assert is_view(bytes_of(tensor[10:20]), tensor[10:20])
    assert bytes_of(tensor[::10]).nbytes == 80


def test_parameters_are_taken_as_they_are():
    parameter = torch.nn.Parameter(torch.randn(3))
    assert is_view(bytes_of(parameter), parameter)
    assert is_view(writable_bytes(parameter), parameter)


def test_a_tensor_without_memory_is_refused():
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(InvalidInputError, match="cannot be stored"):
            bytes_of(tensor)
        assert writable_bytes(tensor) is None


def test_a_tensor_lies_in_the_buffer_without_a_copy():
    buffer = bytearray(12)
    tensor = tensor_in(buffer, torch.int32, (3,))
    tensor[1] = -1
    assert buffer == b"\0\0\0\0\xff\xff\xff\xff\0\0\0\0"


def test_a_buffer_that_does_not_fit_or_may_not_be_written_is_refused():
    with pytest.raises(InvalidInputError, match="takes 12 bytes, not 11"):
        tensor_in(bytearray(11), torch.int32, (3,))
    with pytest.raises(InvalidInputError, match="writable"):
        tensor_in(bytes(12), torch.int32, (3,))


def test_names_of_safetensors_are_each_for_one_dtype():
    assert len(set(SAFETENSORS_NAMES.values())) == len(SAFETENSORS_NAMES)


@pytest.mark.parametrize(("shape", "stride"), [((1,), (2,)), ((1,), (0,)), ((1, 1), (7, 5)), ((1, 3), (9, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex64, torch.bool])
def test_one_element_may_have_any_strides(dtype, shape, stride):
    memory = torch.arange(40).to(torch.uint8).repeat(8).view(torch.uint8)
    tensor = (memory % 2 if dtype is torch.bool else memory).view(dtype)[1:].as_strided(shape, stride)
    assert bytes_of(tensor) == bytes_of(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).clone())
    assert writable_bytes(tensor) == bytes_of(tensor)
