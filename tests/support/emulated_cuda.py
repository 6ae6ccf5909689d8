"""A pytest plugin: torch's CUDA device and CuPy in host memory, so that `Accelerator` runs without a GPU.

    PYTHONPATH=tests python -m pytest -p support.emulated_cuda -m cuda tests/device

`FakeDevice` takes the place of `Accelerator` and reorders streams. Here, each call of `Accelerator` runs, and so do the
kernels, by `cuda_emulator`. All work runs when it is queued. An error shows what a GPU would refuse: NumPy views of its
memory, events that were not recorded, memory that is registered twice, kernels and arguments that do not fit.
"""

import functools
import importlib.machinery
import sys
import tempfile
import threading
import types
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from support.cuda_emulator import Emulator

Tensor = torch.Tensor
DEVICE = torch.device("cuda", 0)
PLAIN_CALLS = frozenset(  # of which no result lies on the device
    {
        "__get__",
        "data_ptr",
        "untyped_storage",
        "is_contiguous",
        "is_conj",
        "is_neg",
        "stride",
        "size",
        "numel",
        "__len__",
    }
)
storages = {}  # on the device, by address; never freed, so that no address is used again
registered = {}  # bytes of page-locked memory, by address


def is_on_device(value):
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return value.untyped_storage().data_ptr() in storages


def to_device(tensor):
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            storages[storage.data_ptr()] = storage
        return tensor


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


class EmulatedDevice(TorchFunctionMode):
    """Answers torch's functions as if some storages lay on a GPU."""

    def __torch_function__(self, function, _types, arguments=(), options=None):
        options = dict(options or {})
        name = getattr(function, "__name__", "")
        first = arguments[0] if arguments else None
        here = is_on_device(first)
        if function == Tensor.is_cuda.__get__:
            return here
        if function == Tensor.is_cpu.__get__:
            return not here
        if function == Tensor.device.__get__ and here:
            return DEVICE
        if function is Tensor.get_device:
            return 0 if here else -1
        if function is Tensor.is_pinned:
            return first.data_ptr() in registered
        if name in PLAIN_CALLS:
            return function(*arguments, **options)
        if function is Tensor.numpy and here:
            raise TypeError("NumPy cannot read the memory of a GPU")
        with torch._C.DisableTorchFunction():
            if function is Tensor.cuda:
                return to_device(first.clone())
            target = next((one for one in arguments[1:] if isinstance(one, (str, torch.device))), options.get("device"))
            if function is Tensor.cpu or (function is Tensor.to and target is not None):
                return to_device(first.clone()) if is_cuda(target) else first.clone() if here else first
        if is_cuda(options.get("device")):
            options["device"], here = "cpu", True
        elif options.get("device") is None:
            here = here or any(map(is_on_device, first if isinstance(first, (list, tuple)) else arguments))
        options.pop("pin_memory", None)
        found = function(*arguments, **options)
        is_in_place = name.endswith("_") and not name.endswith("__")
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if here and not is_in_place and isinstance(one, Tensor) and one.layout is torch.strided:
                to_device(one)
        return found


class Stream:
    def __init__(self, _device=None):
        self.cuda_stream = id(self)

    def __cuda_stream__(self):
        return 0, self.cuda_stream

    def wait_event(self, event):
        assert event.is_recorded

    def __enter__(self):
        streams.open = [*getattr(streams, "open", []), self]

    def __exit__(self, *_):
        streams.open = streams.open[:-1]


class Event:
    is_recorded = False

    def __init__(self, *, blocking):
        assert blocking

    def record(self, stream):
        self.is_recorded = isinstance(stream, Stream)

    def synchronize(self):
        assert self.is_recorded


class Guard:
    """Stands for `torch.cuda.device`, and for a device or stream of CuPy as a context."""

    def __init__(self, device):
        assert device in (0, DEVICE)

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass

    @classmethod
    def from_external(cls, stream):
        assert stream.__cuda_stream__()[0] == 0
        return cls(0)


class Runtime:
    def cudaHostRegister(self, address, length, _flags):
        assert address not in registered
        registered[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del registered[address]


class RawModule:
    def __init__(self, *, code, options):
        assert options == ("-std=c++17",)
        self._code = code

    def get_function(self, name):
        emulator = emulator_of(self._code)

        def launch(grid, block, arguments):
            assert all(isinstance(each, np.generic) for each in arguments)
            pointers = [
                types.SimpleNamespace(data_ptr=functools.partial(int, each)) if each.dtype == np.uint64 else each
                for each in arguments
            ]
            emulator.launch(name, grid, block, pointers)

        return launch


@functools.cache
def emulator_of(code):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cu")
        path.write_text(code)
        return Emulator(path)


streams = threading.local()
default_stream = Stream()
run = threading.Thread.run


def run_on_device(thread):
    with EmulatedDevice():
        run(thread)


def pytest_configure():
    """Replace torch's functions for the whole process."""
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda _index=0: "emulated GPU",
        "get_device_properties": lambda _device: types.SimpleNamespace(multi_processor_count=1),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda _device=None: (getattr(streams, "open", None) or [default_stream])[-1],
        "stream": lambda stream: stream,
        "synchronize": lambda: None,
        "cudart": Runtime,
        "device": Guard,
        "Stream": Stream,
        "Event": Event,
    }.items():
        setattr(torch.cuda, name, value)
    cupy = types.ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    failures = types.SimpleNamespace(CompileException=RuntimeError)
    cupy.cuda = types.SimpleNamespace(Stream=Guard, Device=Guard, compiler=failures)
    cupy.RawModule = RawModule
    sys.modules["cupy"] = cupy
    threading.Thread.run = run_on_device
    EmulatedDevice().__enter__()
