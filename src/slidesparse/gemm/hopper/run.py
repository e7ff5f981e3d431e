"""What the sizes of a product decide of its launch, looked up once a call: the variant, its grid and its numbers."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.base.torch_private import current_stream
from slidesparse.errors import InputError
from slidesparse.gemm.hopper.compile import OUTPUTS, Tile
from slidesparse.gemm.hopper.launch import Arguments, Kernel, load
from slidesparse.gemm.hopper.tiles import GROUP, choose_tile
from slidesparse.gemm.hopper.weights import SLABS, TILE_ROWS, step_bytes
from slidesparse.layout import SLAB_BYTES


class Run(NamedTuple):
    """What the sizes of a product decide.

    Attributes:
        kernel: The variant; None where there is nothing to compute.
        device: Where it is loaded.
        grid: Blocks of the launch.
        tokens: M.
        out_features: Rows of the weight.
        dense_slabs: Slabs of its dense segment.
        sparse_slabs: Slabs of its 2:4 segment.
        slab_bytes: Of the activations.
    """

    kernel: Kernel | None
    device: int
    grid: int
    tokens: int
    out_features: int
    dense_slabs: int
    sparse_slabs: int
    slab_bytes: int

    def launch(
        self,
        x_at: int,
        scale_x_at: int | None,
        sparse_at: int,
        dense_at: int,
        scale_w_at: int | None,
        bias_at: int | None,
        bias_type: int,
        y_at: int,
    ) -> None:
        """Multiply, on the current stream of the device, which is the current one; nothing is checked any more.

        Args:
            x_at: Address of the activations, ``slab_bytes`` of them.
            scale_x_at: Of their scales, float32 [M].
            sparse_at: Of the 2:4 segment.
            dense_at: Of the dense segment.
            scale_w_at: Of the weight's scales, float32 [out].
            bias_at: Of the bias [out].
            bias_type: Of :data:`slidesparse.gemm.hopper.launch.BIAS_TYPES`; 0 without one.
            y_at: Of memory for the product [M, out], of the variant's output type.
        """
        if self.kernel is None:
            return
        arguments = Arguments(
            x_at,
            dense_at,
            sparse_at,
            scale_x_at,
            scale_w_at,
            bias_at,
            y_at,
            self.tokens,
            self.out_features,
            self.dense_slabs,
            self.sparse_slabs,
            bias_type,
            GROUP,
        )
        self.kernel.launch(arguments, self.grid, current_stream(self.device))


def find_run(
    activations: torch.Size,
    dtype: torch.dtype,
    sparse: torch.Size,
    dense: torch.Size,
    out_features: int,
    out_dtype: torch.dtype,
    device: int,
) -> Run:
    """The run of a product, kept from one call to the next: a model has few linears, a server many numbers of tokens.

    Args:
        activations: [M, K'].
        dtype: Their type, and the weight's.
        sparse: Of the steps of the 2:4 segment (gemm/hopper/weights.py).
        dense: Of the steps of the dense one.
        out_features: Rows of the weight.
        out_dtype: bfloat16, float16 or float32.
        device: Index of the CUDA device.

    Raises:
        InputError: The sizes do not fit each other, or there is no such output.
        UnsupportedError: See :func:`slidesparse.gemm.hopper.launch.load`.
    """
    tile = choose_tile(activations[0], out_features, sparse[1], dense[1] // 2)
    return _run(activations, dtype, sparse, dense, out_features, out_dtype, tile, device)


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
    sizes = tokens, out_features, dense_slabs, sparse_slabs, slab_bytes
    if not tokens or not out_features:
        return Run(None, device, 0, *sizes)
    kernel = load(tile, dtype, out_dtype, device)
    return Run(kernel, device, kernel.grid(tile.count(tokens, out_features)), *sizes)
