"""Runs the CUDA kernels of tierfs on the host, so that tests compare them bit for bit without a GPU.

A C++ compiler builds the kernel's own source through ``cuda_emulator.hpp``. The header supplies the built-in
variables, shared memory, barriers, cache hints, atomics, integer and byte intrinsics, and warp operations
(``__shfl_*_sync``, ``__ballot_sync``, ``__reduce_*_sync`` and others). It supplies no inline assembler: a kernel that
uses some must have a plain C version under ``CUDA_EMULATOR``.

::

    emulator = Emulator(KERNELS / "xxh3.cu")
    emulator.launch("xxh3_128_blocks", 4, 128, [addresses, lengths, np.uint32(4), out])

A launch fails with ``EmulatorError`` where a GPU would trap, hang or compute another result than the host: a misaligned
access, an index outside an array, a shift by the width of a type, a barrier that some threads never reach, or lanes at
different warp operations. The emulator does not detect an address outside its buffer, which may crash the process.

Thread blocks run one after another, by number. A thread runs until a barrier or a warp operation, so data races go
undetected. ``reverse=True`` runs warps and lanes from the last to the first and exposes some of them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

SHIM = Path(__file__).with_name("cuda_emulator.hpp")
CHECKS = "alignment,bounds,shift"
PARAMETERS_MAX = 64
KERNEL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)"
)
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w\s:]+?)\s+(\w+)\s*\[\s*\]\s*;"
)


class EmulatorError(Exception):
    """The kernel does not compile, the arguments do not fit it, or it did something that a GPU would not do."""


def compiler() -> str:
    """Return the C++ compiler's path. Skip the running test if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    pytest.skip("no C++ compiler (g++, clang++ or $CXX) to emulate CUDA kernels with")


class Emulator:
    """The kernels of one ``.cu`` file, compiled for this host. Thread-safe: launches take turns.

    Args:
        path: The CUDA source. Its kernels are ``extern "C"`` and no templates.
        defines: Macros to compile with.

    Attributes:
        kernels: The kernels' names.
    """

    def __init__(self, path: str | os.PathLike[str], defines: Mapping[str, str] | None = None) -> None:
        program = compiler()
        source = DYNAMIC_SHARED.sub(
            r"\1* const \2 = reinterpret_cast<\1*>(::cuda_emulator::dynamic_shared());", Path(path).read_text()
        )
        self.kernels = list(dict.fromkeys(KERNEL.findall(source)))
        launchers = "".join(
            f"""
extern "C" const char* cuda_emulator_launch_{name}(const unsigned* dimensions, unsigned reverse, void** arguments) {{
    return ::cuda_emulator::Kernel<&{name}>::launch(dimensions, reverse, arguments);
}}
extern "C" unsigned cuda_emulator_describe_{name}(unsigned* bytes, unsigned* pointers) {{
    return ::cuda_emulator::Kernel<&{name}>::describe(bytes, pointers);
}}
"""
            for name in self.kernels
        )
        self._lock = threading.Lock()
        with tempfile.TemporaryDirectory(prefix="cuda-emulator-") as directory:
            unit, compiled, library = (Path(directory, name) for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            unit.write_text(f'#include "{SHIM}"\n#line 1 "{Path(path).name}"\n{source}\n{launchers}')
            macros = [f"-D{name}={value}" for name, value in (defines or {}).items()]
            # Linked in a separate step, without -fsanitize: the header defines the few functions that the checks
            # call.
            flags = ["-std=c++17", "-O2", "-w", "-fPIC", "-fno-strict-aliasing", "-fwrapv", "-fno-exceptions"]
            checks = ["-U_FORTIFY_SOURCE", f"-fsanitize={CHECKS}"]
            _run([program, *flags, *checks, *macros, "-c", str(unit), "-o", str(compiled)])
            _run([program, "-shared", str(compiled), "-o", str(library)])
            self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[object],
        *,
        shared_bytes: int = 0,
        reverse: bool = False,
    ) -> None:
        """Run ``kernel`` and wait until it ends.

        Args:
            kernel: Its name.
            grid: Thread blocks: a number, or up to three.
            block: Threads in a block: a number, or up to three; at most 1024 in all.
            args: One for each parameter. A C-contiguous array, or an object with ``data_ptr()``, is passed as
            the address
                of its memory; a numpy or ctypes scalar as it is. Python's own numbers are refused, since their size
                is unknown. Sizes are compared with the kernel's parameters.
            shared_bytes: Dynamic shared memory.
            reverse: Run the last warp and lane first.

        Raises:
            EmulatorError: The arguments do not fit the kernel, or it did something that a GPU would not do.
        """
        if kernel not in self.kernels:
            raise EmulatorError(f"there is no kernel {kernel!r}: choose one of {', '.join(self.kernels)}")
        dimensions = [*_three(grid), *_three(block)]
        if np.prod(dimensions[3:]) > 1024 or min(dimensions) < 1:
            raise EmulatorError(f"a GPU cannot launch grid {dimensions[:3]} of blocks {dimensions[3:]}")
        if shared_bytes > 227 << 10:
            raise EmulatorError(
                f"a thread block has at most 227 KiB of shared memory: {shared_bytes} bytes were asked for"
            )
        sizes, pointers = (ctypes.c_uint * PARAMETERS_MAX)(), (ctypes.c_uint * PARAMETERS_MAX)()
        count = getattr(self._library, f"cuda_emulator_describe_{kernel}")(sizes, pointers)
        if count != len(args):
            raise EmulatorError(f"{kernel} has {count} parameters, not {len(args)}")
        packed = [
            _packed(argument, sizes[index], bool(pointers[index]), f"{kernel}, parameter {index}")
            for index, argument in enumerate(args)
        ]
        run = getattr(self._library, f"cuda_emulator_launch_{kernel}")
        run.restype = ctypes.c_char_p
        addresses = (ctypes.c_void_p * max(count, 1))(*(ctypes.addressof(value) for value in packed))
        with self._lock:
            failure = run((ctypes.c_uint * 6)(*dimensions), int(reverse), addresses)
        if failure is not None:
            raise EmulatorError(f"{kernel}: {failure.decode()}")


def _three(dimensions: int | Sequence[int]) -> list[int]:
    given = [int(dimensions)] if isinstance(dimensions, int | np.integer) else [int(value) for value in dimensions]
    return [*given, 1, 1][:3]


def _packed(argument: object, size: int, pointer: bool, place: str) -> ctypes.Array[ctypes.c_char]:
    """Return the argument's bytes as the kernel expects them."""
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise EmulatorError(f"{place}: the array is not C-contiguous")
        raw, is_pointer = argument.ctypes.data.to_bytes(8, "little"), True
    elif hasattr(argument, "data_ptr"):
        raw, is_pointer = argument.data_ptr().to_bytes(8, "little"), True
    elif isinstance(argument, np.generic | ctypes._SimpleCData):
        raw = argument.tobytes() if isinstance(argument, np.generic) else bytes(argument)
        # An address may also be passed as a 64-bit number.
        is_pointer = pointer and len(raw) == 8
    else:
        raise EmulatorError(f"{place}: pass an array, or a numpy or ctypes scalar, not {type(argument).__name__}")
    if len(raw) != size or is_pointer != pointer:
        raise EmulatorError(f"{place}: takes {size} bytes{' (a pointer)' if pointer else ''}, got {argument!r:.80}")
    return ctypes.create_string_buffer(raw, len(raw))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"the host's compiler refused the kernel:\n{done.stderr[:4000]}")
