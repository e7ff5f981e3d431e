"""The backends that multiply weights in steps: our own GEMMs, with scales and bias in their epilogues.

A launch multiplies a 2:4 or dense weight, or a band of its channels, applies ``scale_x``, ``scale_w`` and the bias in
float32 and rounds once. Activations come in slabs (:class:`slidesparse.lifting.layout.Slabs`) from quantise-and-lift,
weights from :mod:`slidesparse.gemm.steps`: no call needs descriptors or a plan. A subclass has a kernel and its tiles.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch

from slidesparse.base.torch_private import empty, is_current
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.backend import Backend, ChainRunner, LiftThenMultiply, OneByOne, Operand, Problem, Runner, gpu_of
from slidesparse.gemm.kernel import AnyTile, driver_version, load_kernels
from slidesparse.gemm.launch import BIAS_TYPES, Band, Choose, WeightAddresses, find_launch
from slidesparse.gemm.nvrtc import TYPES, nvrtc_version
from slidesparse.gemm.spec import Slots
from slidesparse.gemm.step_chain import StepChain
from slidesparse.gemm.step_linear import StepLinear
from slidesparse.gemm.steps import METADATA, StepForm, pack_steps, refuse_dense, step_bytes, unpack_steps
from slidesparse.lifting.choose import Lift, TorchLift
from slidesparse.lifting.layout import check_slabs
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import dtype_name
from slidesparse.weights.support import check_vector


class StepBackend(Backend):
    """A backend that multiplies weights in steps by lifted activations, in a launch for each band."""

    revision: str
    """Revision of the kernel, to increment when its speed changes: measured times belong to one revision."""
    choose: Choose
    """Chooses the tiles of a product."""
    accelerated = True
    layout = METADATA
    value_bits = 8
    """Bits of a kept value in memory."""
    dense = False
    """Whether it has a form for dense weights."""
    oldest_compiler = 12, 0
    """First NVRTC with the kernel's instructions."""

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

    @abstractmethod
    def why_not_on(self, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return the reason why the kernel does not run on a compute capability; None if it does."""

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return f"slidesparse {self.revision}"

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the steps of a weight, uint8: see :func:`slidesparse.gemm.steps.pack_steps`.

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
        """See :class:`slidesparse.gemm.backend.Backend`; lift and product, with only addresses between."""
        by_parts = LiftThenMultiply(self, lift, out_features)
        if isinstance(lift, TorchLift) or not out_features:
            return by_parts
        return StepLinear(lift, by_parts, self.choose, self.value_bits) if lift.tokens else by_parts

    def runner_for_tokens(self, runner: Runner, tokens: int) -> Runner | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return runner.for_tokens(tokens) if isinstance(runner, StepLinear) and tokens else None

    def chain_runner(self, linears: Sequence[tuple[Runner, Slots]]) -> ChainRunner:
        """See :class:`slidesparse.gemm.backend.Backend`; one workspace, and one check of weights."""
        own = [(runner, slots) for runner, slots in linears if isinstance(runner, StepLinear)]
        return StepChain(own, self.name) if len(own) == len(linears) > 1 else OneByOne(linears)

    @abstractmethod
    def tiles(self, dtype: torch.dtype, device: int, dense: bool) -> Iterable[AnyTile]:
        """Return every tile that may be chosen for weights of a type on a device."""

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, dense: bool = False) -> None:
        """See :class:`slidesparse.gemm.backend.Backend`; it loads every tile."""
        index = torch.cuda.current_device() if device.index is None else device.index
        load_kernels(self.tiles(dtype, index, dense), dtype, out_dtype, index, 0, self.value_bits)

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
        gemm = find_launch(*sizes, out_dtype, device, self.choose, tile)
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
