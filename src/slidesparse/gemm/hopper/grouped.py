"""The grouped product on Hopper: one launch multiplies the tokens of all experts of a mixture by their own weights.

Rows of X stand in the order of their experts, and each token tile has one expert (lifting/routed/expert_order.py). The
kernel is that of a single weight; it finds the expert of a tile, and the number of tiles with rows, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from slidesparse.base.torch_private import current_stream, empty, is_current
from slidesparse.errors import InputError
from slidesparse.gemm.hopper.compile import OUTPUTS
from slidesparse.gemm.hopper.launch import Arguments, load_grouped, load_kernels, multiprocessors
from slidesparse.gemm.hopper.tiles import GROUP, WHOLE, Tile, choose_grouped
from slidesparse.gemm.hopper.weights import COUNTS, SLABS, SparseForm, sparse_steps
from slidesparse.lifting.layout import SLAB_BYTES, Lifted, check_slabs
from slidesparse.lifting.routed.expert_order import Arrangement
from slidesparse.weights.packed import PackedWeight, common_bits
from slidesparse.weights.support import check_vector


class HopperExperts:
    """Multiplies by the weights of many experts; see :class:`slidesparse.gemm.grouped.GroupedProduct`."""

    layout = COUNTS
    """An expert gets few tokens, so that bytes decide."""

    def prepare(self, experts: Sequence[PackedWeight]) -> torch.Tensor:
        """Return the 2:4 steps of all experts: uint8 [experts, ...] (:func:`~.weights.sparse_steps`).

        Their values have six bits in memory where those of every expert fit.
        """
        bundle, width = self.layout.bundle(experts[0]), self.width_of(experts)
        steps = torch.stack([sparse_steps(packed, bundle, width) for packed in experts])
        if steps.is_cuda:  # a product may fetch weights while the kernel before it still runs
            torch.cuda.current_stream(steps.device).synchronize()
        return steps

    def width_of(self, experts: Sequence[PackedWeight]) -> int:
        """Return the bits of a kept value in memory."""
        return common_bits(experts)

    def tiles(self, pairs: int, operands: Sequence[torch.Tensor], out_features: Sequence[int]) -> tuple[Tile, ...]:
        """See :class:`slidesparse.gemm.grouped.GroupedProduct`."""
        slabs = (SparseForm.of(operand.shape[1:]).slabs for operand in operands)
        sizes = tuple(zip(out_features, slabs, strict=True))
        return choose_grouped(pairs, operands[0].shape[0], sizes, multiprocessors(operands[0].get_device()))

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> None:
        """Compile and load every tile for these weights, of :meth:`prepare`.

        Raises:
            UnsupportedError: See :func:`slidesparse.gemm.hopper.launch.load_kernel`.
        """
        for form in {SparseForm.of(operand.shape[1:])._replace(slabs=0) for operand in operands}:
            load_kernels(WHOLE, dtype, out_dtype, operands[0].get_device(), form.field, form.width, grouped=True)

    def multiply(
        self,
        x: Lifted,
        operand: torch.Tensor,
        scale: torch.Tensor,
        at: Arrangement,
        out_dtype: torch.dtype,
        tile: Tile,
    ) -> torch.Tensor:
        """See :class:`slidesparse.gemm.grouped.GroupedProduct`; rows of nobody hold anything."""
        device = operand.get_device()
        if not is_current(device):
            with torch.cuda.device(device):
                return self.multiply(x, operand, scale, at, out_dtype, tile)
        (rows, columns), (experts, out), dtype = x.values.shape, scale.shape, x.values.dtype
        form, field, needed = _form_of(operand.shape, experts, out, dtype.itemsize)
        fits = operand.shape == needed and columns * dtype.itemsize == form.slabs * SLAB_BYTES
        if not fits or rows != tile.tokens * len(at.experts) or out_dtype not in OUTPUTS:
            raise InputError(
                "grouped product",
                got=f"activations {[rows, columns]}, weights {list(operand.shape)}, {len(at.experts)} tiles",
                needed=f"{form.slabs * SLAB_BYTES} bytes a row, weights {list(needed)}, {rows // tile.tokens} tiles",
            )
        check_slabs(x.values, SLABS.padded(rows) * SLAB_BYTES * form.slabs)
        check_vector("token scales for the grouped product", x.scale, rows, operand.device, (torch.float32,))
        y = empty(rows, out, out_dtype, device)
        if not y.numel():
            return y
        arguments = Arguments(
            x=x.values.data_ptr(),
            sparse=operand.data_ptr(),
            scale_x=None if x.scale is None else x.scale.data_ptr(),
            scale_w=scale.data_ptr(),
            y=y.data_ptr(),
            tokens=rows,
            channels=out,
            sparse_slabs=form.slabs,
            group=GROUP,
            experts=at.experts.data_ptr(),
            used=at.used.data_ptr(),
            windows=form.windows,
            row=out,
        )
        kernel = load_grouped(tile, dtype, out_dtype, device, field, form.width)
        kernel.launch(arguments, kernel.grid(tile.count(rows, out)), current_stream(device))
        return y


@lru_cache(maxsize=1 << 10)
def _form_of(operand: torch.Size, experts: int, out: int, itemsize: int) -> tuple[SparseForm, int, tuple[int, ...]]:
    """Return the form of weights, the bits of its counts, and the shape that these sizes need in it."""
    form = SparseForm.of(operand[1:])
    return form, form.field, (experts, *form.shape(out, itemsize))
