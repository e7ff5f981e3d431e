"""Grouped GEMM on Hopper: one launch multiplies the rows of all experts of a mixture by their weights.

Rows of X are sorted by expert, and each token tile has one expert (lifting/expert_order.py). The kernel of a single
weight runs, and reads the expert of each tile and the number of used tiles from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from slidesparse.base.torch_private import current_stream, empty, is_current
from slidesparse.errors import InputError
from slidesparse.gemm.grouped import GroupedOperand, GroupedProduct
from slidesparse.gemm.hopper.choose_tiles import DENSE_GROUPED_TILES, GROUPED_TILES, choose_grouped
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.kernel import Arguments, load_kernel, load_kernels, multiprocessors
from slidesparse.gemm.launch import GROUP
from slidesparse.gemm.nvrtc import OUTPUTS
from slidesparse.gemm.steps import COUNTS, SLABS, StepForm, pack_steps, refuse_dense
from slidesparse.lifting.expert_order import Arrangement
from slidesparse.lifting.layout import SLAB_BYTES, ColumnOrder, Lifted, check_slabs
from slidesparse.weights.packed import PackedWeight, common_bits
from slidesparse.weights.support import check_vector


class HopperExperts(GroupedProduct):
    """The grouped product on Hopper."""

    layout = COUNTS
    """Layout with bundles: each expert gets few tokens, so the bytes of its weight decide."""

    def prepare(self, experts: Sequence[PackedWeight]) -> GroupedOperand:
        """Return the steps of all experts, uint8 [experts, ...] (:func:`~.steps.pack_steps`), and their form.

        Values are stored in six bits if those of every expert fit.
        """
        first, value_bits = experts[0], common_bits(experts)
        if value_bits == 8:
            refuse_dense(first)
        order = ColumnOrder.of(first, self.layout.multiple_of(first.dtype), self.layout.bundle(first))
        steps = torch.stack([pack_steps(packed, order.bundle, value_bits) for packed in experts])
        if steps.is_cuda:  # a product may fetch weights while the kernel before it still runs
            torch.cuda.current_stream(steps.device).synchronize()
        return GroupedOperand(steps, StepForm.of_order(order, first.dtype.itemsize, value_bits))

    def tiles(self, pairs: int, operands: Sequence[GroupedOperand], out_features: Sequence[int]) -> tuple[Tile, ...]:
        """See :class:`slidesparse.gemm.grouped.GroupedProduct`."""
        sizes = tuple((out, operand.form.slabs) for out, operand in zip(out_features, operands, strict=True))
        weights, form = operands[0]
        return choose_grouped(pairs, weights.shape[0], sizes, multiprocessors(weights.get_device()), form.dense)

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, operands: Sequence[GroupedOperand]) -> None:
        """Compile and load every tile for these weights, of :meth:`prepare`.

        Raises:
            UnsupportedError: See :func:`slidesparse.gemm.kernel.load_kernel`.
        """
        device = operands[0].weights.get_device()
        for count_bits, value_bits, dense in {(each.form.count_bits, *each.form[2:]) for each in operands}:
            tiles = DENSE_GROUPED_TILES if dense else GROUPED_TILES
            load_kernels(tiles, dtype, out_dtype, device, count_bits, value_bits, grouped=True)

    def multiply(
        self,
        x: Lifted,
        operand: GroupedOperand,
        scale: torch.Tensor,
        arrangement: Arrangement,
        out_dtype: torch.dtype,
        tile: Tile,
    ) -> torch.Tensor:
        """See :class:`slidesparse.gemm.grouped.GroupedProduct`; the contents of padding rows are undefined."""
        weights, form = operand
        device = weights.get_device()
        if not is_current(device):
            with torch.cuda.device(device):
                return self.multiply(x, operand, scale, arrangement, out_dtype, tile)
        (rows, columns), (experts, out), dtype = x.values.shape, scale.shape, x.values.dtype
        count_bits, needed = _needed(form, experts, out, dtype.itemsize)
        fits = weights.shape == needed and columns * dtype.itemsize == form.slabs * SLAB_BYTES
        if not fits or rows != tile.tokens * len(arrangement.experts) or out_dtype not in OUTPUTS:
            raise InputError(
                "grouped product",
                got=f"activations {[rows, columns]}, weights {list(weights.shape)}, {len(arrangement.experts)} tiles",
                needed=f"{form.slabs * SLAB_BYTES} bytes a row, weights {list(needed)}, {rows // tile.tokens} tiles",
            )
        check_slabs(x.values, SLABS.padded(rows) * SLAB_BYTES * form.slabs)
        check_vector("token scales for the grouped product", x.scale, rows, weights.device, (torch.float32,))
        y = empty(rows, out, out_dtype, device)
        if not y.numel():
            return y
        arguments = Arguments(
            x=x.values.data_ptr(),
            sparse=weights.data_ptr(),
            scale_x=None if x.scale is None else x.scale.data_ptr(),
            scale_w=scale.data_ptr(),
            y=y.data_ptr(),
            tokens=rows,
            channels=out,
            sparse_slabs=form.slabs,
            group=GROUP,
            experts=arrangement.experts.data_ptr(),
            used=arrangement.used.data_ptr(),
            windows=form.windows,
            row=out,
        )
        kernel = load_kernel(tile, dtype, out_dtype, device, count_bits, form.value_bits, True)
        kernel.launch(arguments, kernel.grid(tile.count(rows, out)), current_stream(device))
        return y


@lru_cache(maxsize=1 << 10)
def _needed(form: StepForm, experts: int, out: int, itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Return the bits of the counts of a form, and the shape of weights of these sizes in it."""
    return form.count_bits, (experts, *form.shape(out, itemsize))
