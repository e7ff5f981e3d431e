"""The Hopper backend: our own 2:4 GEMM (``gemm/hopper/sparse_gemm.cu``), scales and bias applied where the sum ends.

One launch multiplies the dense and the 2:4 segment into one accumulator, applies ``scale_x``, ``scale_w`` and the bias
in float32 and rounds once. Activations come in slabs (:class:`slidesparse.layout.Slabs`) from the
quantise-and-lift kernel, weights from :mod:`slidesparse.gemm.hopper.weights`: nothing to describe or plan per call.
"""

from __future__ import annotations

import torch

from slidesparse.base.torch_private import empty, is_current
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.backend import Layout, Operand, Problem, check_slabs, gpu_of
from slidesparse.gemm.hopper.chain import HopperChain
from slidesparse.gemm.hopper.compile import OPERANDS, nvrtc_version
from slidesparse.gemm.hopper.launch import BIAS_TYPES, driver_version
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.run import find_run
from slidesparse.gemm.hopper.weights import SLABS, dense_steps, sparse_steps
from slidesparse.packed import PackedWeight
from slidesparse.quant import dtype_name
from slidesparse.support import check_vector

REVISION = "hopper-3"
"""Counted up when a change of the kernel or of its tiles makes it faster or slower: measured times hold for one."""


class Hopper:
    """2:4 and dense segments times lifted activations on sm_90a, in one launch."""

    name = "hopper"
    accelerated = True
    layout = Layout(lifted=True, multiple=1, slabs=SLABS)
    linear_call = HopperLinear
    chain_call = HopperChain

    def why_not(self, problem: Problem) -> str | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
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
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return f"slidesparse {REVISION}"

    def prepare(self, packed: PackedWeight) -> Operand:
        """The steps of the 2:4 segment and those of the dense one, uint8: :mod:`slidesparse.gemm.hopper.weights`.

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
        """See :class:`slidesparse.gemm.backend.Backend`."""
        device, (sparse, dense) = gpu_of(x, self.name), operand
        if not is_current(device):
            with torch.cuda.device(device):
                return self.matmul(x, scale_x, operand, scale_w, bias, out_features, out_dtype)
        if sparse.get_device() != device or dense.get_device() != device:
            raise InputError("weight of the Hopper kernel", got=sparse.device, needed=f"{x.device}, as the activations")
        tokens = x.shape[0]
        run = find_run(x.shape, x.dtype, sparse.shape, dense.shape, out_features, out_dtype, device)
        check_slabs(x, run.slab_bytes)
        check_vector("token scales for the Hopper kernel", scale_x, tokens, x.device, (torch.float32,))
        check_vector("channel scales for the Hopper kernel", scale_w, out_features, x.device, (torch.float32,))
        check_vector("bias for the Hopper kernel", bias, out_features, x.device, tuple(BIAS_TYPES))
        y = empty(tokens, out_features, out_dtype, device)
        scale_x_at = None if scale_x is None else scale_x.data_ptr()
        scale_w_at = None if scale_w is None else scale_w.data_ptr()
        bias_at, bias_type = (None, 0) if bias is None else (bias.data_ptr(), BIAS_TYPES[bias.dtype])
        weight = sparse.data_ptr(), dense.data_ptr(), scale_w_at, bias_at, bias_type
        run.launch(x.data_ptr(), scale_x_at, *weight, y.data_ptr())
        return y
