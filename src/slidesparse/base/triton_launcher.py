"""Launches of Triton kernels in few microseconds of host time: the only module with private interfaces of Triton.

Triton's own launch binds, specialises and hashes every argument on every call: 15 to 20 us for ten of them. Its result
depends on the arguments' types, which are fixed for a launcher, and on whether pointers and strides are multiples of
16. Where they are, the kernel that Triton compiled once is launched with plain numbers; where they are not, and in
Triton's interpreter, every launch goes through Triton.

With a Triton that launches its own kernels in another way than this module, every launch goes through Triton, too, and
the log says why.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from slidesparse.base.log import log_once
from slidesparse.base.torch_private import current_stream, is_current
from slidesparse.errors import first_line

ALIGNMENT = 16
"""Alignment for which Triton specialises: pointers and integers that are multiples of it, or not."""

LARGEST = 2**31 - 1
"""Largest integer that Triton compiles as 32 bits."""

EARLY_START = {"launch_pdl": True}
"""The compiler option for programmatic dependent launch."""

ORDER = (
    *("grid_0", "grid_1", "grid_2", "stream", "function", "packed_metadata", "launch_metadata"),
    *("launch_enter_hook", "launch_exit_hook", "values()"),
)
"""Arguments that Triton 3.4 to 3.9, and :meth:`Launcher.launch`, pass to ``CompiledKernel.run``: the last part of each
expression. ``values()`` means all arguments of the kernel, constants included."""


class Launcher:
    """One kernel on one device, for one type of each argument.

    Args:
        kernel: A ``triton.jit`` function that specialises only the integers that must be multiples of 16.
        constants: Its ``constexpr`` arguments, which are last.
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
        """Whether the kernel for aligned arguments is compiled and can be launched directly."""
        return self._run is not None

    def run(
        self,
        programs: int,
        device: int,
        tensors: tuple[torch.Tensor | None, ...],
        free: tuple[int, ...],
        specialised: tuple[int, ...],
    ) -> None:
        """Launch on the current stream of a device: directly if possible, else through Triton.

        Args:
            programs: Number of programs.
            device: Index of the device; negative where Triton's interpreter runs.
            tensors: The kernel's first arguments.
            free: Its integers that Triton does not specialise, after them.
            specialised: Its other integers.
        """
        if device >= 0 and not is_current(device):
            with torch.cuda.device(device):
                return self.run(programs, device, tensors, free, specialised)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits, largest = 0, 0
        for address in addresses:
            bits |= address or 0
        for number in specialised:
            bits |= number
            largest = max(largest, number)
        aligned = bits % ALIGNMENT == 0 and largest <= LARGEST
        if aligned and self.ready:
            return self.launch(programs, current_stream(device), *addresses, *free, *specialised)
        return self.compile_and_launch(programs, (*tensors, *free, *specialised), aligned)

    def launch(self, programs: int, stream: int, *numbers: object) -> None:
        """Launch the compiled kernel on a ``cudaStream_t`` of the current device; :attr:`ready` must hold.

        ``numbers`` are addresses (None for a missing tensor) and integers, aligned as in the call of
        :meth:`compile_and_launch` that compiled the kernel.
        """
        # No launch metadata and no hooks: Triton's own profiler is the only one to use them.
        nothing = (None, None, None)
        self._run(programs, 1, 1, stream, self._function, self._packed, *nothing, *numbers, *self._constants)

    def compile_and_launch(self, programs: int, arguments: tuple[object, ...], aligned: bool) -> None:
        """Launch through Triton, which compiles the kernel if it must.

        ``arguments`` are tensors of the right types (or None) and numbers; they are ``aligned`` where all pointers, and
        all integers that the kernel specialises, are multiples of 16 and below 2^31.
        """
        with without_hooks():
            compiled = self._kernel[(programs,)](*arguments, *self._constants, **self._options)
        # The interpreter compiles nothing.
        if aligned and compiled is not None and can_launch_directly(compiled):
            self._compiled = compiled
            self._function, self._packed = compiled.function, compiled.packed_metadata
            self._run = compiled.run


def can_launch_directly(compiled: object) -> bool:
    """Return whether :meth:`Launcher.launch` can launch a compiled kernel; if not, log the reason once."""
    lacking = [name for name in ("run", "function", "packed_metadata") if getattr(compiled, name, None) is None]
    refusal = f"its compiled kernels have no {lacking[0]}" if lacking else refusal_of_order()
    if refusal is not None:
        line = "slidesparse: Triton itself launches all kernels, which takes 10 us longer each"
        log_once(f"{line}: {refusal}", logging.WARNING)
    return refusal is None


@lru_cache
def refusal_of_order() -> str | None:
    """Return the reason why Triton does not pass :data:`ORDER` to a compiled kernel; None where it does.

    The launcher that ``run`` calls takes ``*args``; only Triton's own call of it names them.
    """
    try:
        from triton.runtime.jit import JITFunction

        tree = ast.parse(textwrap.dedent(inspect.getsource(JITFunction.run)))
    except (ImportError, AttributeError, OSError, SyntaxError, TypeError) as error:  # also: no source is installed
        return first_line(error)
    calls = (one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    orders = [_passed(one) for one in calls if getattr(one.func, "attr", None) == "run"]
    if orders == [ORDER]:
        return None
    return f"its calls of run are {orders}, not {ORDER}"


def _passed(call: ast.Call) -> tuple[str, ...]:
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return tuple(ast.unparse(argument).rsplit(".", 1)[-1] for argument in passed)


_HOOKS = threading.Lock()


@contextmanager
def without_hooks() -> Iterator[None]:
    """Turn Triton's compilation hooks off.

    Triton passes the constants of a kernel to its hooks as JSON, and raises where one, such as a variant, is not JSON.
    vLLM sets a hook when it begins to serve: a kernel that is first needed after that would end the engine.
    """
    from triton.knobs import runtime

    with _HOOKS:  # else another thread would save, and restore, the None that this one has set
        kept = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        try:
            runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
            yield
        finally:
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = kept
