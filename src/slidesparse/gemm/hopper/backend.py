"""The Hopper backend: our own 2:4 GEMM (``gemm/hopper/csrc``), with scales and bias in its epilogue.

One launch multiplies a 2:4 weight, applies ``scale_x``, ``scale_w`` and the bias in float32 and rounds once.
Activations come in slabs (:class:`slidesparse.lifting.layout.Slabs`) from the quantise-and-lift kernel, weights from
:mod:`slidesparse.gemm.hopper.weights`: no call needs descriptors or a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slidesparse.base.torch_private import empty, is_current
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.backend import Backend, ChainRunner, LiftThenMultiply, OneByOne, Operand, Problem, Runner, gpu_of
from slidesparse.gemm.hopper.chain import HopperChain
from slidesparse.gemm.hopper.choose_tiles import AnyTile, Band, Choose, choose_for
from slidesparse.gemm.hopper.compile import TYPES, nvrtc_version
from slidesparse.gemm.hopper.kernel import driver_version, load_kernels
from slidesparse.gemm.hopper.launch import BIAS_TYPES, WeightAddresses, find_launch
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES
from slidesparse.gemm.hopper.weights import METADATA, StepForm, pack_steps, refuse_dense, step_bytes, unpack_steps
from slidesparse.gemm.spec import Slots
from slidesparse.lifting.choose import Lift, TorchLift
from slidesparse.lifting.layout import check_slabs
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import dtype_name
from slidesparse.weights.support import check_vector

REVISION = "hopper-7"
"""Revision of the kernel, to increment when its speed changes: measured times belong to one revision."""

CAPABILITY = (9, 0)
"""Compute capability of the kernel."""


class Hopper(Backend):
    """The backend that multiplies 2:4 weights by lifted activations on sm_90a, in one launch."""

    name = "hopper"
    accelerated = True
    layout = METADATA
    value_bits = 8
    """Bits of a kept value in memory."""
    dense = False
    """Whether it has a form for dense weights."""
    oldest_compiler = 12, 0
    """First NVRTC with the kernel's instructions."""
    choose: Choose = staticmethod(choose_for)
    """Chooses the tiles of a product."""

    def why_not(self, problem: Problem) -> str | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        if problem.device.type != "cuda":
            return "it needs a CUDA device"
        if problem.dtype not in TYPES:
            return f"it has no {dtype_name(problem.dtype)} kernels"
        if not (self.dense or (problem.slid and problem.pattern != DENSE)):
            return "a dense weight has no 2:4 form"
        refusal = self.why_not_on(torch.cuda.get_device_capability(problem.device), problem.dtype)
        if refusal is not None:
            return refusal
        try:
            compiler, driver = nvrtc_version(), driver_version()
        except UnsupportedError as error:
            return str(error)
        if compiler < self.oldest_compiler:
            return "it needs NVRTC {}.{} or newer".format(*self.oldest_compiler)
        if driver < compiler[0]:
            return f"NVRTC {compiler[0]} makes code that this driver, of CUDA {driver}, cannot load; update the driver"
        return None if self.bits in (None, problem.bits) else "a value of its weight has more than 6 bits"

    def why_not_on(self, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return the reason why the kernel does not run on a compute capability; None if it does."""
        if capability == CAPABILITY:
            return None
        return "it is written for compute capability 9.0 (H100, H200), this GPU has {}.{}".format(*capability)

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`; for six bits the other one reads 0.8 of the bytes."""
        return ("hopper-6bit", "hopper-6bit reads fewer bytes") if problem.bits == 6 else None

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return f"slidesparse {REVISION}"

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the steps of a weight, uint8: see :func:`slidesparse.gemm.hopper.weights.pack_steps`.

        Waits for the device: a product may fetch weights while the kernel before it still runs, so those that write
        them must have ended.

        Raises:
            UnsupportedError: The weight is dense.
            InputError: A value needs more bits: other weights were loaded into a layer.
        """
        if self.bits not in (None, packed.bits):
            what = f"values of a weight for {self.name}"
            raise InputError(what, got="8 bits", needed="INT8 multiples of 4", remedy="use backend='auto'")
        if not self.dense:
            refuse_dense(packed)
        steps = pack_steps(packed, self.layout.bundle(packed), self.value_bits)
        if steps.is_cuda:
            torch.cuda.current_stream(steps.device).synchronize()
        return (steps,)

    def columns(self, operand: Operand, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`slidesparse.gemm.backend.Backend`; in torch, with or without a GPU."""
        return unpack_steps(operand[0], self.form_of(operand[0]), shape[0], dtype)

    def form_of(self, steps: torch.Tensor) -> StepForm:
        """Return the form of a weight on this backend: metadata with every step, or a dense one."""
        dense = self.dense and steps.shape[3] == step_bytes(1, self.value_bits, dense=True)
        return StepForm(steps.shape[1], 0, self.value_bits, dense)

    def runner(self, lift: Lift, out_features: int) -> Runner:
        """See :class:`slidesparse.gemm.backend.Backend`; two launches, with only addresses between."""
        by_parts = LiftThenMultiply(self, lift, out_features)
        if isinstance(lift, TorchLift) or not out_features:
            return by_parts
        return HopperLinear(lift, by_parts, self.value_bits, choose=self.choose) if lift.tokens else by_parts

    def runner_for_tokens(self, runner: Runner, tokens: int) -> Runner | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return runner.for_tokens(tokens) if isinstance(runner, HopperLinear) and tokens else None

    def chain_runner(self, linears: Sequence[tuple[Runner, Slots]]) -> ChainRunner:
        """See :class:`slidesparse.gemm.backend.Backend`; one workspace, and one check of weights."""
        own = [(runner, slots) for runner, slots in linears if isinstance(runner, HopperLinear)]
        return HopperChain(own) if len(own) == len(linears) > 1 else OneByOne(linears)

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, dense: bool = False) -> None:
        """See :class:`slidesparse.gemm.backend.Backend`; it loads every tile."""
        index = torch.cuda.current_device() if device.index is None else device.index
        load_kernels(DENSE_TILES if dense else TILES, dtype, out_dtype, index, 0, self.value_bits)

    def matmul(
        self, x: torch.Tensor, scale_x: torch.Tensor | None, operand: Operand, scale_w: torch.Tensor | None,
        bias: torch.Tensor | None, out_features: int, out_dtype: torch.dtype,
        tile: AnyTile | tuple[Band, ...] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`slidesparse.gemm.backend.Backend`; ``tile``, or two bands, replaces the choice."""
        device, (steps,) = gpu_of(x, self.name), operand
        if not is_current(device):
            with torch.cuda.device(device):
                return self.matmul(x, scale_x, operand, scale_w, bias, out_features, out_dtype, tile)
        if steps.get_device() != device:
            raise InputError(f"weight of {self.name}", got=steps.device, needed=f"{x.device}, as the activations")
        tokens = x.shape[0]
        form = self.form_of(steps)
        sizes = x.shape, x.dtype, form, steps.shape, out_features
        gemm = find_launch(*sizes, out_dtype, device, tile, self.choose)
        check_slabs(x, gemm.slab_bytes)
        check_vector(f"token scales for {self.name}", scale_x, tokens, x.device, (torch.float32,))
        check_vector(f"channel scales for {self.name}", scale_w, out_features, x.device, (torch.float32,))
        check_vector(f"bias for {self.name}", bias, out_features, x.device, tuple(BIAS_TYPES))
        y = empty(tokens, out_features, out_dtype, device)
        weight = WeightAddresses(
            steps.data_ptr(),
            None if scale_w is None else scale_w.data_ptr(),
            None if bias is None else bias.data_ptr(),
            0 if bias is None else BIAS_TYPES[bias.dtype],
        )
        gemm.launch(x.data_ptr(), None if scale_x is None else scale_x.data_ptr(), weight, y.data_ptr())
        return y


class HopperSixBits(Hopper):
    """The Hopper backend for INT8 weights of multiples of 4, stored in six bits.

    ``slidesparse prune --rounding 6bit`` makes such weights.
    """

    name = "hopper-6bit"
    value_bits = bits = 6
    dense = True

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return None
