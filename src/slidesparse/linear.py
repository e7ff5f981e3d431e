"""SlideLinear: a linear layer on a packed weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from slidesparse import ops
from slidesparse.errors import InputError
from slidesparse.gemm import Problem, choose
from slidesparse.gemm.select import Fallback
from slidesparse.packed import PackedWeight, pack
from slidesparse.pattern import Pattern
from slidesparse.prune import Linears, get_pruner
from slidesparse.quant import QUANTISED, dtype_name, parse_dtype, quantize_weight

ACTIVATION_TYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    """

    column_map: torch.Tensor
    groups: torch.Tensor | None
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
        problem = Problem(packed.pattern, packed.dtype, self.out_features, self.in_features, packed.device)
        choice = choose(problem, backend, fallback)
        self.backend, self.reason = choice.backend.name, choice.reason
        operand = choice.backend.prepare(packed)
        self._operand_names = [f"operand_{i}" for i in range(len(operand))]
        for name, tensor in zip(self._operand_names, operand, strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("column_map", choice.backend.layout.column_map(packed), persistent=False)
        columns = choice.backend.layout.columns(packed)
        self._order = [] if columns is None else columns.order
        self.register_buffer("groups", None if columns is None else columns.groups, persistent=False)
        self.register_buffer("weight_scale", packed.scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

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
    def operand(self) -> list[torch.Tensor]:
        """What the backend reads of the weight."""
        return [getattr(self, name) for name in self._operand_names]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: x [..., in] -> [..., out]; ``bias`` [out] takes the place of the layer's own."""
        bias = self.bias if bias is None else bias
        if x.shape[-1:] != (self.in_features,):
            raise InputError("activations of SlideLinear", got=list(x.shape), needed=f"[..., {self.in_features}]")
        tokens = x.reshape(-1, self.in_features)
        scale: torch.Tensor | None = None
        if self.weight_dtype in QUANTISED:
            if x.dtype not in ACTIVATION_TYPES:
                raise InputError("activations of SlideLinear", got=x.dtype, needed="bf16, fp16 or fp32")
            lifted, scale = ops.quantize_lift(
                tokens, self.column_map, self.weight_dtype, self.backend, self.groups, self._order
            )
        elif x.dtype != self.weight_dtype:
            raise InputError("activations of SlideLinear", got=x.dtype, needed=f"{self.weight_dtype}, as the weight")
        else:
            lifted = ops.lift(tokens, self.column_map, self.backend, self.groups, self._order)
        y = ops.gemm(lifted, scale, self.operand, self.weight_scale, bias, self.out_features, x.dtype, self.backend)
        out: torch.Tensor = y.reshape(*x.shape[:-1], self.out_features)
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SlideLinear:
        # model.half() must not round an FP8 weight or a float32 scale: take the device of fn's result, keep the type.
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, dtype={dtype_name(self.weight_dtype)}, backend={self.backend}"
        )


def pack_weight(weight: torch.Tensor, pattern: Pattern, dtype: torch.dtype, *, name: str = "weight") -> PackedWeight:
    """Quantise or cast a float weight [out, in] that satisfies its pattern, and pack it."""
    if dtype in QUANTISED:
        values, scale = quantize_weight(weight, dtype, name=name)
        return pack(values, pattern, scale=scale, name=name)
    return pack(weight.to(dtype), pattern, name=name)
