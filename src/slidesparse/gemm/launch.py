"""The launches of a product: one, or two bands, each with its fastest tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from slidesparse.base.torch_private import current_stream
from slidesparse.errors import InputError
from slidesparse.gemm.kernel import AnyTile, Arguments, Kernel, load_kernel
from slidesparse.gemm.nvrtc import OUTPUTS
from slidesparse.gemm.steps import SLABS, TILE_ROWS, StepForm
from slidesparse.lifting.layout import SLAB_BYTES

GROUP = 16
"""Row tiles that neighbouring blocks cycle through. From 4 to 32 there was no difference beyond noise."""

TOKEN_STEP = 16
"""Multiple of the tokens of every tile, between which no choice changes."""

SECOND_LAUNCH = 8000
"""Least saving of a second band, in clock cycles, from times on an H100 (results/h100/hopper-bands.jsonl): with it the
choice is 0.8 % slower than the better of one and two bands, and never 5 % slower than one. For ``ampere`` see
results/h200/mma-sync-bands.jsonl."""

BIAS_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class WeightAddresses(NamedTuple):
    """The addresses of a weight, in the order of the kernel's arguments.

    Attributes:
        weights: Address of its steps.
        scale: Address of the weight's scales, float32 [out]; None without.
        bias: Address of the bias [out]; None without.
        bias_type: Number of its type in :data:`BIAS_TYPES`; 0 without a bias.
    """

    weights: int
    scale: int | None
    bias: int | None
    bias_type: int


class Band(NamedTuple):
    """The part of a product in one launch: neighbouring channels, in one kind of tiles."""

    tile: AnyTile
    channels: int


Choose: TypeAlias = Callable[[int, int, StepForm, int, int], tuple[Band, ...]]
"""(tokens, channels, form and bytes of a number of the weight, device) -> the launches of a product."""


WHOLE, LEADING, FOLLOWING = range(3)
"""``enum Band`` of the source."""


class BandLaunch(NamedTuple):
    """A launch of a product or band: a variant, its blocks, and the numbers in the arguments.

    ``start`` is the first channel, a multiple of :data:`TILE_ROWS`; ``tile_bytes`` are the bytes of so many rows.
    """

    kernel: Kernel
    grid: int
    sizes: Arguments
    start: int
    tile_bytes: int

    def weight(self, whole: WeightAddresses) -> WeightAddresses:
        """Return the addresses of this band of a weight."""
        bias_bytes = 4 if whole.bias_type == BIAS_TYPES[torch.float32] else 2
        return WeightAddresses(
            whole.weights + self.start // TILE_ROWS * self.tile_bytes,
            None if whole.scale is None else whole.scale + 4 * self.start,
            None if whole.bias is None else whole.bias + bias_bytes * self.start,
            whole.bias_type,
        )


class GemmLaunch:
    """The launches of a product of given sizes: variants, grids and numbers in the arguments.

    Args:
        bands: The tiles, and the channels of each; none for an empty product.
        types: Arguments of :func:`slidesparse.gemm.kernel.load_kernel` between its first and last one.
        sizes: The numbers of the whole product.
        slab_bytes: Bytes of the activations.
        tile_bytes: See :class:`BandLaunch`.
        form: Form of the weight.
        choose: Chooses the tiles for other numbers of tokens.

    Raises:
        UnsupportedError: A kernel cannot be loaded.
    """

    __slots__ = ("_choose", "_form", "_sizes", "_tile_bytes", "_types", "bands", "slab_bytes")

    def __init__(
        self,
        bands: Sequence[Band],
        types: tuple[torch.dtype, torch.dtype, int, int, int],
        sizes: Arguments,
        slab_bytes: int,
        tile_bytes: int,
        form: StepForm,
        choose: Choose,
    ) -> None:
        self.slab_bytes, self._types, self._sizes, self._tile_bytes = slab_bytes, types, sizes, tile_bytes
        self._form, self._choose = form, choose
        self.bands: list[BandLaunch] = []
        start = 0
        for tile, channels in bands:
            own, kernel = Arguments.from_buffer_copy(sizes), load_kernel(tile, *types, False)
            own.channels, own.row = channels, sizes.channels
            own.band = WHOLE if len(bands) == 1 else FOLLOWING if start else LEADING
            grid = kernel.grid(kernel.tile.count(sizes.tokens, channels))
            self.bands.append(BandLaunch(kernel, grid, own, start, tile_bytes))
            start += channels

    def for_tokens(self, tokens: int) -> GemmLaunch:
        """Return the launch of the same weight for another number of tokens, 1 or more, with its fastest tiles."""
        sizes = Arguments.from_buffer_copy(self._sizes)
        sizes.tokens, channels, form = tokens, sizes.channels, self._form
        slab_bytes = SLABS.padded(tokens) * SLAB_BYTES * form.slabs
        bands = self._choose(tokens, channels, form, self._types[0].itemsize, self._types[2]) if channels else ()
        return GemmLaunch(bands, self._types, sizes, slab_bytes, self._tile_bytes, form, self._choose)

    def launch(self, x: int, scale_x: int | None, weight: WeightAddresses, y: int) -> None:
        """Multiply, unchecked, on the current stream of the device, which must be the current one.

        Addresses: ``x`` of ``slab_bytes`` bytes, ``scale_x`` float32 [M] or None, ``y`` [M, out] of the output type.
        """
        for band in self.bands:
            own = band.weight(weight) if band.start else weight
            arguments = Arguments.from_buffer_copy(band.sizes)
            arguments.x, arguments.scale_x, arguments.y = x, scale_x, y + band.start * self._types[1].itemsize
            arguments.sparse, arguments.scale_w, arguments.bias, arguments.bias_type = own
            band.kernel.launch(arguments, band.grid, current_stream(self._types[2]))


def find_launch(
    activations: torch.Size, dtype: torch.dtype, form: StepForm, steps: torch.Size,
    out_features: int, out_dtype: torch.dtype, device: int,
    choose: Choose, tile: AnyTile | tuple[Band, ...] | None = None,
) -> GemmLaunch:  # fmt: skip
    """Return the cached launch of a product.

    Args:
        activations: [M, K'].
        dtype: Their type, and the weight's.
        form: Form of the prepared weight.
        steps: Shape of the weight's steps (gemm/steps.py).
        out_features: Rows of the weight.
        out_dtype: bfloat16, float16 or float32.
        device: Index of the CUDA device.
        choose: Chooses the tiles.
        tile: The tile, or those of two bands, in place of a choice.

    Raises:
        InputError: The sizes do not fit each other, or there is no such output.
        UnsupportedError: See :func:`slidesparse.gemm.kernel.load_kernel`.
    """
    if tile is None:
        bands = choose(activations[0], out_features, form, dtype.itemsize, device)
    else:
        bands = tile if isinstance(tile, tuple) else (Band(tile, out_features),)
    return _launch(activations, dtype, form, steps, out_features, out_dtype, device, bands, choose)


@lru_cache(maxsize=1 << 13)
def _launch(
    activations: torch.Size, dtype: torch.dtype, form: StepForm, steps: torch.Size,
    out_features: int, out_dtype: torch.dtype, device: int, bands: tuple[Band, ...],
    choose: Choose,
) -> GemmLaunch:  # fmt: skip
    if out_dtype not in OUTPUTS:
        raise InputError("output type of a kernel", got=out_dtype, needed="bfloat16, float16 or float32")
    tokens, columns = activations[0], SLAB_BYTES // dtype.itemsize * form.slabs
    fits = activations[1] == columns and steps[1:] == form.shape(out_features, dtype.itemsize)[1:]
    if not fits or out_features > TILE_ROWS * steps[0]:
        raise InputError(
            f"activations {list(activations)} {dtype} for {out_features} outputs",
            needed=f"{columns} columns, at most {TILE_ROWS * steps[0]} outputs, as the weight was prepared",
            remedy="quantise and lift with this weight's own columns",
        )
    slab_bytes = math.prod(SLABS.shape(tokens, columns, dtype.itemsize)) * dtype.itemsize
    sizes = Arguments(tokens=tokens, channels=out_features, sparse_slabs=form.slabs, group=GROUP, windows=form.windows)
    types = dtype, out_dtype, device, form.count_bits, form.value_bits
    bands = bands if tokens and out_features else ()
    return GemmLaunch(bands, types, sizes, slab_bytes, math.prod(steps[1:]), form, choose)
