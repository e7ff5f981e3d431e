"""The cuSPARSELt backend: NVIDIA's 2:4 GEMM, from Ampere on.

    acc[M, out] = x[M, K'] @ W[out, K']^T        the library, into int32 (INT8) or float32 (FP8)
    y = scale_x * (scale_w * acc) + bias         kernels/scale.py, one rounding

The library offers no per-token scale, hence the second kernel. Its matrices are column-major: W row-major is its
[K', out], transposed; x row-major is its [K', M]; and its product [out, M] is acc row-major.

A *plan* belongs to one shape, M included, and takes half a millisecond to make. So M is padded to a bucket, plans are
kept, and a call in steady state makes no plan: it costs one call into the library and one kernel launch.

A partial pattern runs its dense segment through torch into an accumulator of its own; the second kernel adds the two,
exactly for INT8 (the library's ``beta`` goes through float32) and with the same number of bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from slidesparse.base import torch_private
from slidesparse.base.torch_private import empty, is_current
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.backend import Backend, Operand, Problem, gpu_of, release
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt.capabilities import why_no_kernels
from slidesparse.gemm.cusparselt.plan import (
    ALIGNMENT,
    MatmulPlan,
    Shape,
    compress_matrix,
    device_index,
    handle_of,
    plan_for,
)
from slidesparse.gemm.cusparselt.table import AlgorithmRecord, known_algorithms, nearest_record, table_path
from slidesparse.lifting.layout import Layout, with_rows
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, dtype_name
from slidesparse.weights.support import as_bits

MULTIPLE = 32
"""Rows and columns of a sparse 8-bit matrix must be multiples of 32, those of a 16-bit one of 16: 32 serves all, and
every row starts at a multiple of 16 bytes, as the library asks of pointers."""

SMALLEST_BUCKET = 32
"""torch._int_mm, which runs the dense segment, refuses 16 rows; no kernel has a tile of fewer than 64."""

ACCUMULATORS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}
"""Type of operands -> type of the GEMM's output. 16-bit operands have an output of their own type, rounded once."""


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
"""Plans that a CUDA graph may have recorded: never destroyed, since a plan may own memory that its kernels read."""

Bare = Callable[[torch.Tensor, Operand, int], torch.Tensor]

# -- the backend ---------------------------------------------------------------------------------------------------


class CuSparseLt(Backend):
    """The backend that multiplies 2:4 weights by lifted activations through cuSPARSELt.

    Args:
        intermediate: ``"exact"``: the GEMM writes int32 or float32 accumulators, which are rounded once, at the end.
            ``"bf16"``: it writes bfloat16, which halves the bytes between the two kernels and rounds twice: an output
            may have one more bf16 rounding error (2^-9 of its value, before the bias). ``auto`` never takes it.

    A 16-bit layer's bias is rounded to the layer's type before it is added.
    """

    layout = Layout(lifted=True, multiple=MULTIPLE, rows=token_bucket)

    def __init__(self, intermediate: Literal["exact", "bf16"] = "exact") -> None:
        if intermediate not in ("exact", "bf16"):
            raise InputError("unknown intermediate", got=repr(intermediate), needed="exact or bf16")
        self._accumulators = ACCUMULATORS if intermediate == "exact" else dict.fromkeys(ACCUMULATORS, torch.bfloat16)
        self.accelerated = intermediate == "exact"
        self.name = "cusparselt" if intermediate == "exact" else "cusparselt-bf16"

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
        return self._why_not_pattern(problem)

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`: 16 to 16384 tokens, by its default algorithms.

        139 8-bit products on an H200 (results/h200/hopper-cusparselt-int8.jsonl and -fp8.jsonl), and layers at 6:8 in
        BF16 at 18 sizes on an H100 (results/h100/vllm/served-starts-halves.txt).
        """
        most = 0.83 if problem.dtype in QUANTISED else 0.87
        return "hopper", f"hopper took at most {most} of its time wherever both were measured"

    def accumulator_bytes(self, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: torch.device) -> int:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        accumulator = self._accumulators.get(dtype)
        return 0 if accumulator is None else accumulator.itemsize

    def _why_not_pattern(self, problem: Problem) -> str | None:
        pattern = problem.pattern
        if pattern.is_uniform:
            return None
        if pattern == DENSE:
            return "a dense weight has no 2:4 segment"
        if not problem.slid:
            return "no group of this weight is slid, so it has no 2:4 segment"
        if problem.dtype not in QUANTISED or self.name != "cusparselt":
            return "a partial pattern runs as two GEMMs, whose sum would be rounded twice in 16-bit accumulators"
        return None

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return release("cuSPARSELt", api.load_library().version_text)

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the compressed 2:4 segment, uint8 [bytes]; with a dense one also that, [out, its K'], and a float32 1.

        Raises:
            UnsupportedError: When no group is slid (a shard of a partial weight can be so).
        """
        matrices, start, whole, pattern = {}, 0, as_bits(packed.columns()), packed.pattern
        for segment in packed.segments:
            columns = len(segment.groups) * (pattern.slid_group if segment.kind == "2:4" else pattern.group)
            padding = (0, -columns % MULTIPLE, 0, -len(whole) % MULTIPLE)
            matrix = F.pad(whole[:, start : start + columns], padding)
            matrices[segment.kind] = matrix.contiguous().view(packed.dtype)
            start += columns
        if "2:4" not in matrices:
            raise UnsupportedError(
                "cuSPARSELt multiplies 2:4 segments", got="a weight without one", remedy="use backend='dense'"
            )
        operand = [compress_matrix(matrices["2:4"])]
        if "dense" in matrices:
            # With a type: vLLM packs layers while the model's type is torch's default, and torch refuses such a scale.
            operand += [matrices["dense"], torch.ones((), dtype=torch.float32, device=packed.device)]
        return tuple(operand)

    def algorithms_tried(self, problem: Problem, tokens: int) -> list[tuple[str, float | None, str | None]]:
        """Return (name, microseconds, why not) of all algorithms that a search tried here, the chosen one first."""
        record = self._record(self._shape(problem, tokens))
        first = sorted(record.tried, key=lambda trial: trial.algorithm != record.algorithm) if record else []
        return [(str(trial.algorithm), trial.time_us, trial.fault) for trial in first]

    def finalists(self, problem: Problem, tokens: int, count: int) -> list[tuple[str, Bare]]:
        """Return the fastest algorithms of a search at this shape, each as :meth:`bare`; [] without a search."""
        shape = self._shape(problem, tokens)
        record = self._record(shape)
        timed = [(trial.time_us, trial.algorithm) for trial in (record.tried if record else ()) if trial.time_us]
        fastest = sorted(timed, key=lambda pair: pair[0])[:count]
        return [(str(algorithm), partial(self._bare, MatmulPlan(shape, algorithm))) for _, algorithm in fastest]

    def _record(self, shape: Shape) -> AlgorithmRecord | None:
        return nearest_record(known_algorithms(table_path()), shape.key, shape.rows)

    def _shape(self, problem: Problem, tokens: int) -> Shape:
        groups = problem.pattern.groups(problem.in_features)
        columns = problem.pattern.following(groups) * problem.pattern.slid_group
        out, columns = (size + -size % MULTIPLE for size in (problem.out_features, columns))
        accumulator = self._accumulators.get(problem.dtype, problem.dtype)
        return Shape(
            device_index(problem.device), out, columns, columns, token_bucket(tokens), problem.dtype, accumulator
        )

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
        accumulator = self._accumulators.get(x.dtype, x.dtype)
        if accumulator == x.dtype and out_dtype != x.dtype:
            raise UnsupportedError(
                "output of a 16-bit cuSPARSELt GEMM", got=out_dtype, needed=f"{x.dtype}, as the input"
            )
        x = _aligned(with_rows(x, token_bucket(tokens)))
        dense = operand[1].shape[1] if len(operand) > 1 else 0
        if accumulator == x.dtype:
            return self._product(x, 0, operand[0], out_features, bias)[:tokens, :out_features].contiguous()

        from slidesparse.gemm.scale import scale_rows

        acc = self._product(x, dense, operand[0], out_features)
        more = _dense_product(x[:, :dense], operand[1], operand[2]) if dense else None
        return scale_rows(acc, more, scale_x, scale_w, bias, tokens, out_features, out_dtype)

    def bare(self, x: torch.Tensor, operand: Operand, out_features: int) -> torch.Tensor:
        """Return the library's product alone, for a uniform pattern: [>= M, >= out], the accumulators."""
        return self._bare(None, x, operand, out_features)

    def _bare(self, plan: MatmulPlan | None, x: torch.Tensor, operand: Operand, out_features: int) -> torch.Tensor:
        with torch.cuda.device(x.get_device()):
            return self._product(_aligned(with_rows(x, token_bucket(len(x)))), 0, operand[0], out_features, plan=plan)

    def _product(
        self,
        x: torch.Tensor,
        start: int,
        weight: torch.Tensor,
        out_features: int,
        bias: torch.Tensor | None = None,
        plan: MatmulPlan | None = None,
    ) -> torch.Tensor:
        """Multiply activations [rows, K'], from column ``start`` on, by the 2:4 segment, and add the bias."""
        rows, stride = x.shape
        out = out_features + -out_features % MULTIPLE
        accumulator = self._accumulators.get(x.dtype, x.dtype)
        if plan is None:
            plan = plan_for(Shape(x.get_device(), out, stride - start, stride, rows, x.dtype, accumulator))
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(plan)
        acc = empty(rows, out, accumulator, x.get_device())
        if bias is not None:
            acc[:, :out_features] = bias
        plan.run(weight, x.data_ptr() + start * x.element_size(), acc, accumulate=bias is not None)
        return acc


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _dense_product(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight^T`` by torch (cuBLASLt): int32 for int8, float32 for FP8."""
    if x.dtype == torch.int8:
        return torch_private.int8_mm(x, weight.T)
    return torch_private.fp8_mm(x, weight.T, one, one, out_dtype=torch.float32)
