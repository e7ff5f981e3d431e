"""SlideLinear: a linear layer on a packed weight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import nn

from slidesparse import ops
from slidesparse.errors import InputError
from slidesparse.gemm import Problem, choose, get_backend
from slidesparse.gemm.select import Fallback
from slidesparse.gemm.spec import Form, Switch
from slidesparse.packed import PackedWeight
from slidesparse.packing import pack
from slidesparse.pattern import Pattern
from slidesparse.prune import Linears, get_pruner
from slidesparse.quant import QUANTISED, dtype_name, parse_dtype, quantize_weight

ACTIVATION_TYPES = (torch.bfloat16, torch.float16, torch.float32)

_LOG = logging.getLogger("slidesparse")


@lru_cache(maxsize=4096)
def _log_once(text: str) -> None:
    _LOG.info(text)


class WeightForm(nn.Module):
    """A packed weight in the form of one backend, and which input column feeds which of its columns.

    Args:
        packed: The weight.
        backend: The backend's name.
    """

    column_map: torch.Tensor
    pairs: torch.Tensor

    def __init__(self, packed: PackedWeight, backend: str) -> None:
        super().__init__()
        chosen = get_backend(backend)
        self.backend = backend
        columns = chosen.layout.columns(packed)
        self._order = () if columns is None else tuple(columns.order)
        self.register_buffer("column_map", chosen.layout.column_map(packed), persistent=False)
        moved = None if columns is None else columns.pairs
        nothing = torch.empty(0, dtype=torch.int32, device=packed.device)
        self.register_buffer("pairs", nothing if moved is None else moved, persistent=False)
        operand = chosen.prepare(packed)
        self._names = [f"operand_{i}" for i in range(len(operand))]
        for name, tensor in zip(self._names, operand, strict=True):
            self.register_buffer(name, tensor)

    @property
    def operand(self) -> list[torch.Tensor]:
        """What the backend reads of the weight."""
        return [getattr(self, name) for name in self._names]

    @property
    def operand_bytes(self) -> int:
        """What the operand takes."""
        return sum(tensor.nbytes for tensor in self.operand)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the operator ``linear`` takes: all buffers, in the order in which they were registered."""
        return cast("list[torch.Tensor]", list(self._buffers.values()))

    def describe(self) -> Form:
        """What the operator is told of them."""
        return Form(self.backend, self._order, len(self.tensors))


class SlideLinear(nn.Module):
    """``y = x W^T + b`` with W packed, in inference.

    Activations [..., in] in bfloat16, float16 or float32; outputs [..., out] in the same type. With an INT8 or FP8
    weight each token is quantised on the way in (:mod:`slidesparse.quant`).

    Build it on the device on which it will run: the backend is chosen for that device. ``model.to(dtype)`` moves the
    layer but leaves its types alone.

    Args:
        packed: The weight; an INT8 or FP8 one with its scale.
        bias: [out], float, or None.
        backend: ``auto`` or a backend's name.
        fallback: What ``auto`` does where no accelerated backend can run: see :mod:`slidesparse.gemm.select`.

    Attributes:
        choice: Which backend runs for how many tokens, and why; logged once for each kind of layer.
        forms: The weight in the form of each of these backends.
        switch: What the operators are told of it (:class:`slidesparse.gemm.spec.Switch`), as text.
    """

    weight_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        backend: str = "auto",
        fallback: Fallback = "dense",
    ) -> None:
        super().__init__()
        if (packed.scale is not None) != (packed.dtype in QUANTISED):
            raise InputError(
                f"a packed {packed.dtype} weight {'without' if packed.scale is None else 'with'} a scale",
                needed="a scale for int8 and fp8, none for other types",
            )
        self.out_features, self.in_features = packed.shape
        self.pattern = packed.pattern
        self.weight_dtype = packed.dtype
        slid = any(segment.kind == "2:4" for segment in packed.segments)
        problem = Problem(packed.pattern, packed.dtype, self.out_features, self.in_features, packed.device, slid)
        self.choice = choose(problem, backend, fallback)
        forms = nn.ModuleList(WeightForm(packed, name) for name in self.choice.backends)
        self.forms = cast("list[WeightForm]", forms)  # a ModuleList, which has no type for its elements
        self._forms = tuple(self.forms)  # the same, where a call finds them without a Module's search for attributes
        described = tuple(form.describe() for form in self.forms)
        self.switch = Switch(self.out_features, dtype_name(packed.dtype), described, self.choice.routes).to_text()
        self.register_buffer("weight_scale", packed.scale)
        self.register_buffer("bias", None if bias is None else _checked_bias(bias, self.out_features))
        _log_once(self._summary())

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        pattern: Pattern | str,
        dtype: str | torch.dtype = "int8",
        *,
        method: str | None = None,
        backend: str = "auto",
        fallback: Fallback = "dense",
        name: str = "weight",
    ) -> SlideLinear:
        """Take over a linear layer.

        Args:
            linear: Its weight [out, in] and bias.
            pattern: The pattern of the packed weight.
            dtype: ``int8`` or ``fp8`` to quantise; ``bf16``, ``fp16`` or ``fp32`` to store as that.
            method: A pruning method to apply first; None when the weight satisfies the pattern already.
            backend: ``auto`` or a backend's name.
            fallback: What ``auto`` does where no accelerated backend can run: see :mod:`slidesparse.gemm.select`.
            name: What error messages call the weight.

        Raises:
            PatternViolation: When the weight does not satisfy the pattern and no method was given.
        """
        pattern, storage = Pattern.parse(pattern), parse_dtype(dtype)
        weight = linear.weight.detach()
        if method is not None:
            weight = get_pruner(method).prune(Linears({name: weight}, pattern))[name]
        packed = pack_weight(weight, pattern, storage, name=name)
        return cls(packed, linear.bias, backend=backend, fallback=fallback)

    @property
    def operand_bytes(self) -> dict[str, int]:
        """Backend -> bytes of the form of the weight that is kept for it."""
        return {form.backend: form.operand_bytes for form in self.forms}

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: x [..., in] -> [..., out]; ``bias`` [out] takes the place of the layer's own."""
        if x.shape[-1:] != (self.in_features,):
            raise InputError("activations of SlideLinear", got=list(x.shape), needed=f"[..., {self.in_features}]")
        if self.weight_dtype in QUANTISED:
            if x.dtype not in ACTIVATION_TYPES:
                raise InputError("activations of SlideLinear", got=x.dtype, needed="bf16, fp16 or fp32")
        elif x.dtype != self.weight_dtype:
            raise InputError("activations of SlideLinear", got=x.dtype, needed=f"{self.weight_dtype}, as the weight")
        tensors = [tensor for form in self._forms for tensor in form.tensors]
        # Not by attribute, which a Module looks for in several places: half a microsecond each.
        own = self._buffers["bias"]
        scales = (self._buffers["weight_scale"], own if bias is None else _checked_bias(bias, self.out_features))
        tokens = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = ops.linear(tokens, tensors, *scales, self.switch)
        out: torch.Tensor = y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SlideLinear:
        # model.half() must not round an FP8 weight or a float32 scale: take the device of fn's result, keep the type.
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # its forms are its own affair

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, dtype={dtype_name(self.weight_dtype)}, backend={'+'.join(self.choice.backends)}"
        )

    def _summary(self) -> str:
        name = f"{self.out_features}x{self.in_features} {self.pattern} {dtype_name(self.weight_dtype)}"
        kept = ", ".join(f"{backend} {size / 1e6:.1f} MB" for backend, size in self.operand_bytes.items())
        return f"{name}: {self.choice.describe()} ({self.choice.reason}); kept: {kept}"


def _checked_bias(bias: torch.Tensor, out_features: int) -> torch.Tensor:
    if bias.shape != (out_features,) or not bias.is_floating_point():
        raise InputError(
            "bias of SlideLinear", got=f"{list(bias.shape)} {bias.dtype}", needed=f"floats [{out_features}]"
        )
    return bias.detach().contiguous()  # kernels read it by its address


def pack_weight(weight: torch.Tensor, pattern: Pattern, dtype: torch.dtype, *, name: str = "weight") -> PackedWeight:
    """Quantise or cast a float weight [out, in] that satisfies its pattern, and pack it."""
    if dtype in QUANTISED:
        values, scale = quantize_weight(weight, dtype, name=name)
        return pack(values, pattern, scale=scale, name=name)
    return pack(weight.to(dtype), pattern, name=name)
