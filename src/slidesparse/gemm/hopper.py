"""The Hopper backend: our own 2:4 GEMM (``csrc/sparse_gemm.cu``), scales and bias applied where the sum ends.

One launch multiplies the dense and the 2:4 segment into one accumulator, applies ``scale_x``, ``scale_w`` and the bias
in float32 and rounds once. Activations come in slabs (:class:`slidesparse.kernels.columns.Slabs`) from the
quantise-and-lift kernel, weights from :mod:`slidesparse.gemm.hopper_layout`: nothing to describe or plan per call.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.base import Layout, Operand, Problem, check_slabs, gpu_of
from slidesparse.gemm.hopper_compile import OPERANDS, OUTPUTS, Tile, nvrtc_version
from slidesparse.gemm.hopper_launch import BIAS_TYPES, Arguments, Kernel, driver_version, load
from slidesparse.gemm.hopper_layout import TILE_ROWS, dense_steps, sparse_steps, step_bytes
from slidesparse.gemm.hopper_tiles import GROUP, choose_tile
from slidesparse.kernels.columns import SLAB_BYTES, Slabs
from slidesparse.kernels.launcher import current_stream, empty, is_current
from slidesparse.packed import PackedWeight
from slidesparse.quant import dtype_name
from slidesparse.support import check_vector

SLABS = Slabs(swizzle=True)

REVISION = "hopper-3"
"""Counted up when a change of the kernel or of its tiles makes it faster or slower: measured times hold for one."""


class Hopper:
    """2:4 and dense segments times lifted activations on sm_90a, in one launch."""

    name = "hopper"
    accelerated = True
    layout = Layout(lifted=True, multiple=1, slabs=SLABS)

    def why_not(self, problem: Problem) -> str | None:
        """See :class:`slidesparse.gemm.base.Backend`."""
        if problem.device.type != "cuda":
            return "it needs a CUDA device"
        if problem.dtype not in OPERANDS:
            return f"it has no {dtype_name(problem.dtype)} kernels"
        major, minor = torch.cuda.get_device_capability(problem.device)
        if (major, minor) != (9, 0):
            return f"it is written for compute capability 9.0 (H100, H200), this GPU has {major}.{minor}"
        try:
            compiler, driver = nvrtc_version(), driver_version()
        except UnsupportedError as error:
            return str(error)
        if driver < compiler[0]:
            return f"NVRTC {compiler[0]} makes code that this driver, of CUDA {driver}, cannot load; update the driver"
        return None

    def library(self) -> str:
        """See :class:`slidesparse.gemm.base.Backend`."""
        return f"slidesparse {REVISION}"

    def prepare(self, packed: PackedWeight) -> Operand:
        """The steps of the 2:4 segment and those of the dense one, uint8: :mod:`slidesparse.gemm.hopper_layout`.

        Waits for the device: a product may fetch weights while the kernel before it still runs, so the kernels that
        write them must have ended.
        """
        operand = sparse_steps(packed), dense_steps(packed)
        if operand[0].is_cuda:
            torch.cuda.current_stream(operand[0].device).synchronize()
        return operand

    def matmul(
        self,
        x: torch.Tensor,
        scale_x: torch.Tensor | None,
        operand: Operand,
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        out_features: int,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """See :class:`slidesparse.gemm.base.Backend`."""
        device, (sparse, dense) = gpu_of(x, self.name), operand
        if not is_current(device):
            with torch.cuda.device(device):
                return self.matmul(x, scale_x, operand, scale_w, bias, out_features, out_dtype)
        if sparse.get_device() != device or dense.get_device() != device:
            raise InputError("weight of the Hopper kernel", got=sparse.device, needed=f"{x.device}, as the activations")
        tokens = x.shape[0]
        tile = choose_tile(tokens, out_features, sparse.shape[1], dense.shape[1] // 2)
        run = _run(x.shape, x.dtype, sparse.shape, dense.shape, out_features, out_dtype, tile, device)
        check_slabs(x, run.slab_bytes)
        check_vector("token scales for the Hopper kernel", scale_x, tokens, x.device, (torch.float32,))
        check_vector("channel scales for the Hopper kernel", scale_w, out_features, x.device, (torch.float32,))
        check_vector("bias for the Hopper kernel", bias, out_features, x.device, tuple(BIAS_TYPES))
        y = empty(tokens, out_features, out_dtype, device)
        if run.kernel is None:
            return y
        arguments = Arguments(
            x.data_ptr(),
            dense.data_ptr(),
            sparse.data_ptr(),
            None if scale_x is None else scale_x.data_ptr(),
            None if scale_w is None else scale_w.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            tokens,
            out_features,
            run.dense_slabs,
            run.sparse_slabs,
            0 if bias is None else BIAS_TYPES[bias.dtype],
            GROUP,
        )
        run.kernel.launch(arguments, run.tiles, current_stream(device))
        return y


class Run(NamedTuple):
    """What the sizes of a product decide.

    Attributes:
        kernel: The variant; None where there is nothing to compute.
        tiles: Of the product.
        sparse_slabs: Slabs of the 2:4 segment.
        dense_slabs: Slabs of the dense one.
        slab_bytes: Of the activations.
    """

    kernel: Kernel | None
    tiles: int
    sparse_slabs: int
    dense_slabs: int
    slab_bytes: int


@lru_cache(maxsize=1 << 16)
def _run(
    activations: torch.Size,
    dtype: torch.dtype,
    sparse: torch.Size,
    dense: torch.Size,
    out_features: int,
    out_dtype: torch.dtype,
    tile: Tile,
    device: int,
) -> Run:
    """One look-up a call: a model has few linears, and a server many numbers of tokens."""
    tokens, sparse_slabs, dense_slabs = activations[0], sparse[1], dense[1] // 2
    if out_dtype not in OUTPUTS:
        raise InputError("output type of the Hopper kernel", got=out_dtype, needed="bfloat16, float16 or float32")
    columns = SLAB_BYTES // dtype.itemsize * (sparse_slabs + dense_slabs)
    fits = activations[1] == columns and sparse[3] == step_bytes(dtype.itemsize)
    if not fits or out_features > TILE_ROWS * sparse[0]:
        raise InputError(
            f"activations {list(activations)} {dtype} for {out_features} outputs",
            needed=f"{columns} columns, at most {TILE_ROWS * sparse[0]} outputs, as the weight was prepared",
            remedy="quantise and lift with this weight's own columns",
        )
    slab_bytes = math.prod(SLABS.shape(tokens, columns, dtype.itemsize)) * dtype.itemsize
    if not tokens or not out_features:
        return Run(None, 0, sparse_slabs, dense_slabs, slab_bytes)
    kernel = load(tile, dtype, out_dtype, device)
    return Run(kernel, tile.count(tokens, out_features), sparse_slabs, dense_slabs, slab_bytes)
