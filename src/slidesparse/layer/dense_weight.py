"""A weight that is computed when something computes with it, and that takes no memory until then.

Some models look at ``linear.weight`` instead of calling the layer: T5 compares its type with that of the activations,
Mamba multiplies by it. A packed layer answers with a :class:`DenseWeight`.
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
"""Functions whose result shares the weight's memory. They give the promise itself: writing into it is refused."""

ABOUT = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | {getattr(torch.Tensor, n) for n in _METHODS}
"""Functions that ask about a tensor and need none of its values."""

ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage}
"""Functions whose result is used after the call, by readers of memory such as safetensors."""


class DenseWeight(torch.Tensor):
    """A weight [out, in] that is made by a function, anew for every torch function that needs its values.

    Shape, type and device are known before; strides are not, until it is made. Once its address
    was asked for, it stays in memory as long as the promise. A view is of a weight that was made, and what is written
    into it is lost: a view that refuses would be a promise of its own, and every product with ``weight.t()`` would make
    the weight twice.
    """

    make: Callable[[], torch.Tensor]
    addressed: torch.Tensor | None = None

    @classmethod
    def of(
        cls, make: Callable[[], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> DenseWeight:
        """Promise a weight.

        Args:
            make: Computes the weight, with this shape, type and device.
            shape: [out, in].
            dtype: Its type.
            device: Its device.
        """
        # One element of memory, and no number: code that torch tells us nothing of shall not compute with it unseen.
        promised = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape).as_subclass(cls)
        promised.make = make
        return promised

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer from what is known, or make the weight and call the function with it.

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
        if writes and args and _has_promise(args[0]):
            cls.refuse(name)
        if isinstance((kwargs or {}).get("out"), cls):
            cls.refuse(f"{name} with out=")
        return func(*_made(args), **_made(dict(kwargs or {})))

    def _addressable(self) -> torch.Tensor:
        """Return the weight in memory that stays as long as this promise, so that its address holds as long."""
        if self.addressed is None:
            self.addressed = self.make()
        return self.addressed

    @classmethod
    def refuse(cls, name: str) -> None:
        """Refuse a function that writes into the weight.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "a packed weight cannot be written to", got=name, remedy="leave the layer dense with ignore (--ignore NAME)"
        )


def _has_promise(written: Any) -> bool:
    """Return whether a promised weight is written into, alone or in a list, as ``torch._foreach_mul_`` takes."""
    return any(isinstance(one, DenseWeight) for one in (written if isinstance(written, list | tuple) else [written]))


def _made(value: Any) -> Any:
    """Return arguments with every promised weight made."""
    if isinstance(value, DenseWeight):
        return value.make()
    if isinstance(value, dict):
        return {key: _made(one) for key, one in value.items()}
    return type(value)(map(_made, value)) if type(value) in (tuple, list) else value
