"""Launch a Triton kernel for a few microseconds of host time.

Triton's own launch binds, specialises and hashes every argument on every call: 15 to 20 us for ten of them. What it
decides there depends on the arguments' types, which a launcher is made for, and on whether pointers and strides are
multiples of 16. Where they are, the kernel that Triton compiled once is launched with plain numbers; where they are
not, and in Triton's interpreter, every launch goes through Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined] # its stubs lag behind

from slidesparse.errors import InputError

ALIGNMENT = 16
"""Triton compiles for pointers and integers that are multiples of this, and for those that are not."""

LARGEST = 2**31 - 1
"""Triton compiles larger integers as 64 bits wide, others as 32."""


class Launcher:
    """One kernel on one device, for one type of each argument.

    Args:
        kernel: A ``triton.jit`` function that specialises none of the integers but those that must be multiples of 16.
        constants: Its ``constexpr`` arguments, which stand last.
        options: ``num_warps`` and other options of the compiler.
    """

    __slots__ = ("_compiled", "_constants", "_function", "_kernel", "_options", "_packed", "_run")

    def __init__(self, kernel: Any, constants: tuple[object, ...], **options: object) -> None:
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled: Any = None  # Triton unloads a kernel's code, and _function with it, when this object dies
        self._run: Any = None
        self._function: Any = None
        self._packed: Any = None

    @property
    def ready(self) -> bool:
        """There is a kernel for aligned arguments."""
        return self._run is not None

    def run(
        self,
        programs: int,
        device: int,
        tensors: tuple[torch.Tensor | None, ...],
        free: tuple[int, ...],
        specialised: tuple[int, ...],
    ) -> None:
        """Launch by whichever of the two ways below is right, on the current stream.

        Args:
            programs: How many.
            device: Index of the current device; negative where Triton's interpreter runs.
            tensors: The kernel's first arguments.
            free: Its integers that Triton does not specialise, after them.
            specialised: Its other integers.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits, largest = 0, 0
        for address in addresses:
            bits |= address or 0
        for number in specialised:
            bits |= number
            largest = max(largest, number)
        aligned = bits % ALIGNMENT == 0 and largest <= LARGEST
        if aligned and self.ready:
            self.launch(programs, current_stream(device), *addresses, *free, *specialised)
        else:
            self.compile_and_launch(programs, (*tensors, *free, *specialised), aligned)

    def launch(self, programs: int, stream: int, *numbers: object) -> None:
        """Launch the compiled kernel on the current device; :attr:`ready` must hold.

        Args:
            programs: How many.
            stream: ``cudaStream_t`` as a number.
            numbers: Addresses (None for a missing tensor) and numbers, all as aligned as :meth:`compile_and_launch`
                was told that they are.
        """
        # No launch metadata and no hooks: Triton's own profiler is the only one to use them.
        nothing = (None, None, None)
        self._run(programs, 1, 1, stream, self._function, self._packed, *nothing, *numbers, *self._constants)

    def compile_and_launch(self, programs: int, arguments: tuple[object, ...], aligned: bool) -> None:
        """Launch through Triton, which compiles what it must.

        Args:
            programs: How many.
            arguments: Tensors of the right types (or None) and numbers.
            aligned: All pointers, and all integers that the kernel specialises, are multiples of 16 and below 2^31.
        """
        with without_hooks():
            compiled = self._kernel[(programs,)](*arguments, *self._constants, **self._options)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            self._compiled = compiled
            self._function, self._packed = compiled.function, compiled.packed_metadata
            self._run = compiled.run


_HOOKS = threading.Lock()


@contextmanager
def without_hooks() -> Iterator[None]:
    """Nobody listens while Triton compiles.

    Triton tells listeners the constants of a kernel as JSON, and raises where one, such as a plan, is no JSON. vLLM
    listens as soon as it serves: a kernel that is needed for the first time then would end the engine.
    """
    try:
        from triton import knobs
    except ImportError:  # before 3.4 Triton kept them elsewhere, and vLLM did not listen
        yield
        return
    hooks = "jit_cache_hook", "jit_post_compile_hook"
    with _HOOKS:  # another thread would keep what this one has put in their place
        kept = {name: getattr(knobs.runtime, name) for name in hooks}
        try:
            for name in hooks:
                setattr(knobs.runtime, name, None)
            yield
        finally:
            for name, hook in kept.items():
                setattr(knobs.runtime, name, hook)


@lru_cache
def early_start() -> dict[str, bool]:
    """What lets a kernel start before the one before it has ended, where Triton knows that option."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return {"launch_pdl": True} if "launch_pdl" in CUDAOptions.__dataclass_fields__ else {}  # from 3.4 on


def current_stream(device: int) -> int:
    """``cudaStream_t`` of the current stream of a device, as a number."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def is_current(device: int) -> bool:
    """A CUDA device, by its index, is the current one: kernels launch there."""
    current: int = torch._C._cuda_getDevice()
    return current == device


def empty(rows: int, columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """``torch.empty`` for half of its host time, by the function that Inductor's code allocates with.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        dtype: Of its elements.
        device: Index of the current CUDA device; negative for the CPU, where Triton's interpreter runs.

    Raises:
        InputError: Another device is the current one.
    """
    if device < 0:
        return torch.empty(rows, columns, dtype=dtype)
    if not is_current(device):
        raise InputError("a kernel's device", got=f"cuda:{device}", needed="the current device")
    return empty_here(rows, columns, dtype)


def empty_here(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The same on the current CUDA device, whichever that is."""
    made: torch.Tensor = _empty_strided_cuda((rows, columns), (columns, 1), dtype)
    return made
