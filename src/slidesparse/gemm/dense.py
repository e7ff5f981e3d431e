"""The dense backend: the unpacked weight times the activations as they are.

It runs where sparsity does not pay, so on a GPU it is the best available dense GEMM:

* INT8 and FP8 inside of SGLang: its own kernels, with scales and bias fused; but see WITHOUT_INT8.
* INT8 and FP8 with vLLM installed: its CUTLASS kernel, likewise; but see TORCH_ROWS, too.
* INT8 otherwise: ``torch._int_mm`` (cuBLASLt) into int32, then gemm/scale.py.
* FP8 otherwise: ``torch._scaled_mm`` with row-wise scales, which writes bf16; other outputs go into float32, then
  gemm/scale.py.
* BF16, FP16 and FP32: torch's own.

FP8 kernels that write bf16 sum in the Tensor Core's own accumulator (``use_fast_accum``, as vLLM's do): about 13 bits
of each addition survive on Hopper. On a CPU, on a GPU without kernels for the type, and for outputs that no kernel
writes, the reference product runs: exact for INT8, to float32 summation order for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slidesparse.base import torch_private
from slidesparse.base.torch_private import empty_here
from slidesparse.gemm.backend import WITHOUT_INT8, LiftThenMultiply, Operand, Products, Runner, log_by_parts, release
from slidesparse.gemm.reference import Reference, apply_scales, product
from slidesparse.lifting.choose import Lift, TorchLift
from slidesparse.lifting.layout import Layout, LinearTensors, with_rows
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import QUANTISED
from slidesparse.weights.support import as_bits, is_vector

if TYPE_CHECKING:
    from slidesparse.lifting.kernel import KernelLift  # needs Triton

MULTIPLE = 16
"""Multiple of both dimensions of a weight for 8-bit kernels: 16 (vLLM and _scaled_mm) or 8 (_int_mm)."""

FEWEST_ROWS = 32
"""Fewest rows, by padding: _int_mm refuses up to 16."""

HOPPER = (9, 0)

TORCH_ROWS = 256
"""Fewest tokens at which torch's row-wise FP8 kernel is the faster one on Hopper: on an H200 by 3 to 8 % at 256 tokens
and by 3 to 13 % at 16384, whereas vLLM's is up to twice as fast at 64 (results/h200)."""


def padded_rows(tokens: int) -> int:
    """Return the rows to allocate for M tokens."""
    return max(tokens, FEWEST_ROWS) if tokens else 0


class Dense(Reference):
    """The backend that multiplies the pruned weight in dense form."""

    name = "dense"
    layout = Layout(lifted=False, multiple=MULTIPLE, rows=padded_rows)

    def library(self) -> str:
        """Return torch's name, with SGLang's or vLLM's if its 8-bit kernels are used."""
        torchs = super().library()
        if sglang_scaled_mm() is not None:
            return f"{release('SGLang', metadata.version('sglang'))}, {torchs}"
        return torchs if vllm_scaled_mm() is None else f"{release('vLLM', metadata.version('vllm'))}, {torchs}"

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the weight, zeros in place: [out, K], both padded; for FP8 also a float32 1."""
        weight = as_bits(packed.unpack())
        padding = (0, -weight.shape[1] % MULTIPLE, 0, -weight.shape[0] % MULTIPLE)
        weight = F.pad(weight, padding).view(packed.dtype)
        if packed.device.type == "cuda" and packed.dtype in QUANTISED:
            vllm_scaled_mm()
        if packed.dtype != torch.float8_e4m3fn:
            return (weight,)
        # On a CPU, too, as the layer may move to a GPU. With a type: vLLM changes the default while it loads.
        return weight, torch.ones((), dtype=torch.float32, device=packed.device)

    def accumulator_bytes(self, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: torch.device) -> int:
        """See :class:`slidesparse.gemm.backend.Backend`: 4 where no kernel applies the scales itself."""
        if device.type != "cuda" or dtype not in QUANTISED:
            return 0
        index = torch.cuda.current_device() if device.index is None else device.index
        return 4 if fused_product(dtype, out_dtype, tokens, index) is None else 0

    def runner(self, lift: Lift, out_features: int) -> Runner:
        """See :class:`slidesparse.gemm.backend.Backend`; fused where a kernel applies scales and bias itself."""
        by_parts = LiftThenMultiply(self, lift, out_features)
        if isinstance(lift, TorchLift) or not out_features or out_features % MULTIPLE:  # padded: by parts
            return by_parts
        multiply = _fused_after(lift) if lift.tokens else None
        return by_parts if multiply is None else DenseLinear(lift, by_parts, multiply)

    def matmul(
        self, x: torch.Tensor, scale_x: torch.Tensor | None, operand: Operand, scale_w: torch.Tensor | None,
        bias: torch.Tensor | None, out_features: int, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`slidesparse.gemm.backend.Backend`."""
        weight = operand[0]
        if x.device.type == "cuda" and x.shape[0]:
            if x.dtype in QUANTISED and _has_kernels(x.dtype, x.get_device()):
                return _quantised(x, scale_x, operand, scale_w, bias, out_features, out_dtype)
            if x.dtype == out_dtype and scale_x is None and scale_w is None:
                return F.linear(x, weight[:out_features], None if bias is None else bias.to(x.dtype))
        return apply_scales(product(x, weight)[:, :out_features], scale_x, scale_w, bias, out_dtype)


Multiply = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.dtype], torch.Tensor
]
"""(x [M, K], weight [out, K], scale_x [M, 1], scale_w [out], bias [out], type) -> [M, out] of that type."""


def _fused_after(lift: KernelLift) -> Multiply | None:
    if not lift.quantised or lift.padded != lift.tokens or not _has_kernels(lift.target, lift.index):
        return None
    return fused_product(lift.target, lift.source, lift.tokens, lift.index)


class DenseLinear:
    """Runs a dense linear with little host time between its two launches; see :data:`Runner`.

    Args:
        lift: The lift, row-major and without padding.
        by_parts: The runner for cases that this one cannot run.
        multiply: The product, for biases of the activations' type.
    """

    __slots__ = ("_by_parts", "_lift", "_multiply", "_out", "_shape")

    def __init__(self, lift: KernelLift, by_parts: LiftThenMultiply, multiply: Multiply) -> None:
        self._lift, self._by_parts, self._multiply, self._out = lift, by_parts, multiply, by_parts.out_features
        self._shape = torch.Size((self._out, lift.k_packed))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors, eps: float) -> Products:
        """See :data:`slidesparse.gemm.backend.Runner`."""
        lift, (_, operand, scale_w, bias, norm_weight) = self._lift, tensors
        inputs = lift.inputs(x, residual, norm_weight)
        if inputs is None or scale_w is None or not self._reads(operand[0], scale_w, bias):
            log_by_parts(self, lift, x, residual, tensors)
            return self._by_parts(x, residual, tensors, eps)
        residual_out = None if residual is None else empty_here(*lift.shape, lift.source)
        values, scale = empty_here(lift.tokens, lift.k_packed, lift.target), empty_here(lift.tokens, 1, torch.float32)
        residual_out_at = None if residual_out is None else residual_out.data_ptr()
        lift.launch(inputs, eps, residual_out=residual_out_at, values=values.data_ptr(), scale=scale.data_ptr())
        return self._multiply(values, operand[0], scale, scale_w, bias, lift.source), residual_out

    def _reads(self, weight: torch.Tensor, scale_w: torch.Tensor, bias: torch.Tensor | None) -> bool:
        lift = self._lift
        if weight.shape != self._shape or weight.dtype != lift.target or weight.device != lift.device:
            return False
        if not is_vector(scale_w, self._out, lift.device, (torch.float32,)):
            return False
        return bias is None or is_vector(bias, self._out, lift.device, (lift.source,))

    def __repr__(self) -> str:
        return "dense, fused"


def _quantised(
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    operand: Operand,
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    weight, tokens = operand[0], x.shape[0]
    # A padded weight has more rows than scales; such sizes are rare, and the general path below runs them.
    if scale_x is not None and scale_w is not None and out_features == len(weight):
        multiply = fused_product(x.dtype, out_dtype, tokens, x.get_device())
        if multiply is not None and (bias is None or bias.dtype == out_dtype):
            return multiply(x, weight, scale_x, scale_w, bias, out_dtype)
    if x.dtype == torch.int8:
        acc = torch_private.int8_mm(with_rows(x, padded_rows(tokens)), weight.T)
    else:
        acc = torch_private.fp8_mm(x, weight.T, operand[1], operand[1], out_dtype=torch.float32)

    from slidesparse.gemm.scale import scale_rows

    return scale_rows(acc, scale_x, scale_w, bias, tokens, out_features, out_dtype)


def fused_product(dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: int) -> Multiply | None:
    """Return the fastest kernel that applies scales and a bias of the output's type; None without one."""
    torchs = dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    fits = out_dtype in (torch.bfloat16, torch.float16) and (dtype != torch.int8 or _capability(device) < WITHOUT_INT8)
    if fits and (own := sglang_scaled_mm()) is not None:
        return lambda x, w, scale_x, scale_w, bias, kind: own[dtype](x, w.t(), scale_x, scale_w, kind, bias)
    scaled_mm = vllm_scaled_mm() if fits else None
    if scaled_mm is not None and not (torchs and tokens >= TORCH_ROWS and _capability(device) == HOPPER):
        return partial(_by_vllm, scaled_mm)
    return _by_torch if torchs else None


def _by_vllm(
    scaled_mm: Callable[..., None],
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    scaled_mm(y, x, weight.t(), scale_x, scale_w, bias)
    return y


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    options = {"out_dtype": out_dtype, "use_fast_accum": True}
    return torch_private.fp8_mm(x, weight.t(), scale_x, scale_w.unsqueeze(0), bias, **options)


def _has_kernels(dtype: torch.dtype, device: int) -> bool:
    """Return whether 8-bit kernels run: FP8 needs compute capability 8.9, and Triton, which applies scales, 8.0."""
    return _capability(device) >= ((8, 9) if dtype == torch.float8_e4m3fn else (8, 0))


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def sglang_scaled_mm() -> dict[torch.dtype, Callable[..., torch.Tensor]] | None:
    """Return SGLang's ``scaled_mm(x, w, scale_x, scale_w, out_dtype, bias)`` of each type; None outside of SGLang."""
    if "sglang" not in sys.modules:
        return None
    with suppress(ImportError, OSError, AttributeError):
        import_module("sgl_kernel")  # registers them
        kernels = torch.ops.sgl_kernel
        return {torch.int8: kernels.int8_scaled_mm.default, torch.float8_e4m3fn: kernels.fp8_scaled_mm.default}
    return None


@lru_cache(maxsize=1)
def vllm_scaled_mm() -> Callable[..., None] | None:
    """Return vLLM's ``cutlass_scaled_mm(y, x, w, scale_x, scale_w, bias)``; None where vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    # The operator has moved between extensions, which register it in the same namespace.
    for extension in ("vllm._C", "vllm._C_stable_libtorch"):
        with suppress(ImportError, OSError):
            import_module(extension)
    operator = getattr(torch.ops._C, "cutlass_scaled_mm", None)
    return None if operator is None else operator.default  # without a search for the overload on each call
