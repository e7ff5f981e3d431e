"""The cuSPARSELt backend: NVIDIA's 2:4 GEMM, from Ampere on.

    acc[M, out] = x[M, K'] @ W[out, K']^T        the library, into int32 (INT8) or float32 (FP8)
    y = scale_x * (scale_w * acc) + bias         gemm/scale.py, one rounding

The library offers no per-token scale, hence the second kernel. Its matrices are column-major: W row-major is its
[K', out], transposed; x row-major is its [K', M]; and its product [out, M] is acc row-major.

A *plan* is for one shape, M included, and takes half a millisecond to make. So M is padded to a bucket and plans are
cached: a steady call costs one call into the library and one kernel launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slidesparse.base.torch_private import empty, is_current
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.backend import Backend, Operand, Problem, gpu_of, release
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt.capabilities import why_no_kernels
from slidesparse.gemm.cusparselt.plan import (
    ACCUMULATORS,
    ALIGNMENT,
    MatmulPlan,
    Shape,
    algorithm_of,
    compress_matrix,
    device_index,
    handle_of,
    plan_for,
)
from slidesparse.lifting.layout import Layout, with_rows
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, dtype_name
from slidesparse.weights.support import as_bits

MULTIPLE = 32
"""Multiple of rows and columns of a sparse matrix: 32 of 8 bits, 16 of 16 bits. With 32 every row also starts at a
multiple of 16 bytes, which the library needs of pointers."""

AT_ONCE = 1024
"""Columns of a matrix that one product reads back."""

SMALLEST_BUCKET = 32
"""Fewest padded rows; no kernel has a tile of fewer than 64."""


def token_bucket(tokens: int) -> int:
    """Return the padded rows for M tokens: 16 buckets an octave, at most 6.25 % of padding from 256 tokens on.

    >>> [token_bucket(m) for m in (0, 1, 33, 256, 257, 1000, 65536)]
    [0, 32, 48, 256, 272, 1024, 65536]
    """
    if tokens == 0:
        return 0
    step = max(16, 1 << max(0, tokens.bit_length() - 5))
    return max(SMALLEST_BUCKET, -(-tokens // step) * step)


_CAPTURED: set[MatmulPlan] = set()
"""Plans that CUDA graphs may have captured: never destroyed, since their kernels may read a plan's memory."""

# -- the backend ---------------------------------------------------------------------------------------------------


class CuSparseLt(Backend):
    """The backend that multiplies 2:4 weights by lifted activations through cuSPARSELt.

    A 16-bit layer's bias is rounded to the layer's type before it is added.
    """

    name = "cusparselt"
    accelerated = True
    layout = Layout(lifted=True, multiple=MULTIPLE, rows=token_bucket)

    def why_not(self, problem: Problem) -> str | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        if problem.device.type != "cuda":
            return "it needs a CUDA device"
        if problem.dtype not in api.COMPUTE_TYPES:
            return f"it has no {dtype_name(problem.dtype)} kernels that are exact"
        capability = torch.cuda.get_device_capability(problem.device)
        if (reason := why_no_kernels(problem.dtype, capability)) is not None:
            return reason
        try:
            version = api.load_library().version
            handle_of(device_index(problem.device))  # the library says whether it supports this GPU and its driver
        except UnsupportedError as error:
            return str(error)
        if problem.dtype == torch.float16 and capability[0] == 9 and version < (0, 9, 0):
            # "illegal instruction" destroys the process's CUDA context; it cannot be caught.
            return "FP16 kernels of cuSPARSELt 0.8 fail on Hopper from 128 tokens on; use bf16, or 0.9"
        return None if problem.slid and problem.pattern != DENSE else "a dense weight has no 2:4 form"

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`: 16 to 16384 tokens, by its default algorithms.

        139 8-bit products on an H200 (results/h200/hopper-cusparselt-int8.jsonl and -fp8.jsonl), and layers at 6:8 in
        BF16 at 18 sizes on an H100 (results/h100/vllm/served-starts-halves.txt).
        """
        most = 0.83 if problem.dtype in QUANTISED else 0.87
        return "hopper", f"hopper took at most {most} of its default algorithm's time wherever both were measured"

    def accumulator_bytes(self, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: torch.device) -> int:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        accumulator = ACCUMULATORS.get(dtype)
        return 0 if accumulator is None else accumulator.itemsize

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return release("cuSPARSELt", api.load_library().version_text)

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the compressed 2:4 matrix, uint8 [bytes].

        Raises:
            UnsupportedError: The weight is dense.
        """
        if not packed.slid:
            raise UnsupportedError("cuSPARSELt multiplies 2:4 weights", got="dense", remedy="use backend='dense'")
        slid = as_bits(packed.columns())
        padded = F.pad(slid, (0, -slid.shape[1] % MULTIPLE, 0, -len(slid) % MULTIPLE))
        return (compress_matrix(padded.view(packed.dtype)),)

    def columns(self, operand: Operand, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`slidesparse.gemm.backend.Backend`.

        The library neither documents its layout nor reverses its compression, so an identity matrix multiplies the
        weight: each sum has one non-zero term, which every accumulator and 16-bit output represents exactly.
        """
        (compressed,), (out, k_packed) = operand, shape
        if not compressed.is_cuda:
            raise UnsupportedError(
                "a weight in cuSPARSELt's layout, which only the library can read",
                got=f"it on {compressed.device}",
                needed="a CUDA device",
                remedy="move the layer back",
            )
        parts = []
        for start in range(0, k_packed, AT_ONCE):
            rows = torch.zeros(min(AT_ONCE, k_packed - start), k_packed, dtype=torch.bfloat16, device=compressed.device)
            rows.diagonal(start).fill_(1)
            products = self.bare(rows.to(dtype), operand, out)[: len(rows), :out]
            parts.append((products + 0).to(dtype).T)  # a sum of zeros may be -0
        return torch.cat(parts, 1)

    def matmul(
        self, x: torch.Tensor, scale_x: torch.Tensor | None, operand: Operand, scale_w: torch.Tensor | None,
        bias: torch.Tensor | None, out_features: int, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`slidesparse.gemm.backend.Backend`."""
        device = gpu_of(x, self.name)
        if x.shape[0] == 0:
            return x.new_empty(0, out_features, dtype=out_dtype)
        if not is_current(device):
            with torch.cuda.device(device):
                return self.matmul(x, scale_x, operand, scale_w, bias, out_features, out_dtype)
        tokens = len(x)
        if x.dtype not in ACCUMULATORS and out_dtype != x.dtype:
            raise UnsupportedError(
                "output of a 16-bit cuSPARSELt GEMM", got=out_dtype, needed=f"{x.dtype}, as the input"
            )
        x = _aligned(with_rows(x, token_bucket(tokens)))
        if x.dtype not in ACCUMULATORS:
            return self._product(x, operand[0], out_features, bias)[:tokens, :out_features].contiguous()

        from slidesparse.gemm.scale import scale_rows

        acc = self._product(x, operand[0], out_features)
        return scale_rows(acc, scale_x, scale_w, bias, tokens, out_features, out_dtype)

    def bare(self, x: torch.Tensor, operand: Operand, out_features: int) -> torch.Tensor:
        """Return the library's product alone: [>= M, >= out], the accumulators."""
        with torch.cuda.device(x.get_device()):
            return self._product(_aligned(with_rows(x, token_bucket(len(x)))), operand[0], out_features)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply activations [rows, K'] by the 2:4 matrix, and add the bias."""
        shape = Shape(x.get_device(), out_features + -out_features % MULTIPLE, x.shape[1], x.shape[0], x.dtype)
        plan = plan_for(shape, algorithm_of(shape, weight))
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(plan)
        acc = empty(shape.rows, shape.out, shape.accumulator, shape.device)
        if bias is not None:
            acc[:, :out_features] = bias
        plan.run(weight, x.data_ptr(), acc, accumulate=bias is not None)
        return acc


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.data_ptr() % ALIGNMENT else x
