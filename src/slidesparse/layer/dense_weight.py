"""A lazy dense weight: computed when a torch function needs its values, without memory until then.

Some models read ``linear.weight`` instead of calling the layer: T5 compares its type with that of the activations,
Mamba multiplies by it. A packed layer returns a :class:`DenseWeight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slidesparse.errors import UnsupportedError

_PROPERTIES = ("device", "dtype", "is_cpu", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape")
_METHODS = ("dim", "element_size", "is_complex", "is_floating_point", "numel", "size")

SAME = {torch.Tensor.data.__get__, torch.Tensor.detach}  # type: ignore[attr-defined]
"""Functions whose result shares the weight's memory. They return the lazy weight itself, which refuses writes."""

ABOUT = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | {getattr(torch.Tensor, n) for n in _METHODS}
"""Functions that need no values."""

ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage}
"""Functions for readers of memory, such as safetensors, who use the result after the call."""


class DenseWeight(torch.Tensor):
    """A weight [out, in] that a function computes, once for every torch function that needs its values.

    Shape, type and device are known before; strides are not. Once its address was read, it stays in memory as long as
    this object. A view is one of a computed weight, and writes into it are lost: a view that refuses them would have to
    be lazy too, and ``x @ weight.t()`` would compute the weight twice.
    """

    make: Callable[[], torch.Tensor]
    addressed: torch.Tensor | None = None

    @classmethod
    def of(
        cls, make: Callable[[], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> DenseWeight:
        """Return a lazy weight [out, in] of this shape, type and device, which ``make`` computes."""
        # One element of memory, NaN: code that bypasses __torch_function__ must not compute with it unnoticed.
        lazy = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape).as_subclass(cls)
        lazy.make = make
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer without values if possible, else compute the weight and call the function.

        Raises:
            UnsupportedError: The function would write into the weight.
        """
        if func in SAME and args and isinstance(args[0], cls):
            return args[0]
        if func in ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        if func in ADDRESSES and args and isinstance(args[0], cls):
            return func(args[0]._addressable())
        name = getattr(func, "__name__", "")
        writes = name in ("__set__", "__setitem__") or re.fullmatch(r"_?[a-z].*_", name) is not None
        if writes and args and _is_lazy(args[0]):
            cls.refuse(name)
        if isinstance((kwargs or {}).get("out"), cls):
            cls.refuse(f"{name} with out=")
        return func(*computed(args, cls), **computed(dict(kwargs or {}), cls))

    def _addressable(self) -> torch.Tensor:
        """Return the computed weight, which lives as long as this object, so that its address stays valid."""
        if self.addressed is None:
            self.addressed = self.make()
        return self.addressed

    @classmethod
    def refuse(cls, name: str) -> None:
        """Raise an UnsupportedError for a function that writes into the weight."""
        raise UnsupportedError(
            "a packed weight cannot be written to", got=name, remedy="leave the layer dense with ignore (--ignore NAME)"
        )


def _is_lazy(written: Any) -> bool:
    """Return whether the target of a write is a lazy weight, or a list with one, as of ``torch._foreach_mul_``."""
    return any(isinstance(one, DenseWeight) for one in (written if isinstance(written, list | tuple) else [written]))


def computed(value: Any, lazy: Any) -> Any:
    """Return arguments with every lazy tensor computed."""
    if isinstance(value, lazy):
        return value.make()
    if isinstance(value, dict):
        return {key: computed(one, lazy) for key, one in value.items()}
    return type(value)(computed(one, lazy) for one in value) if type(value) in (tuple, list) else value
