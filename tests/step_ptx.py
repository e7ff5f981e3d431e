"""Run the kernels in the emulator of their PTX, on the package's own operands."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import torch
from ptx_emulator.compiled import compile_program
from ptx_emulator.machine import Machine
from ptx_emulator.program import Program
from ptx_emulator.state import GlobalMemory
from slab_views import slab_view

from slidesparse.gemm import launch
from slidesparse.gemm.ampere import compile as ampere
from slidesparse.gemm.ampere.tiles import MmaTile
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.compile import options, sources
from slidesparse.gemm.kernel import AnyTile, Arguments
from slidesparse.gemm.launch import BIAS_TYPES, Band, WeightAddresses
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.gemm.steps import SLABS
from slidesparse.lifting.layout import Lifted
from slidesparse.ops import quantize_lift
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.quant import quantize_rows

OUT, COLUMNS = 300, 600
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""

GUARD = 64
"""Results past the last one, which nothing may write."""

MULTIPROCESSORS = 2
"""So few that a block walks over several tiles."""


@cache
def program(
    tile: AnyTile,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    count_bits: int = 0,
    value_bits: int = 8,
    grouped: bool = False,
    edit: tuple[str, str] | None = None,
) -> Program:
    """Return the PTX of a variant, which NVRTC writes; ``edit`` replaces one text in them by another."""
    if isinstance(tile, MmaTile):
        arch = "sm_89" if dtype == torch.float8_e4m3fn else "sm_80"
        files, given = ampere.sources(), ampere.options(tile, dtype, out_dtype, value_bits, arch)
    else:
        given = options(tile, dtype, out_dtype, grouped, count_bits, value_bits)
        files = sources(count_bits, value_bits, tile.dense)
    if edit is not None:
        assert any(edit[0] in text for text in files.values())
        files = {name: text.replace(*edit) for name, text in files.items()}
    return compile_program(files, [option.replace("architecture=sm_", "architecture=compute_") for option in given])


class EmulatedKernel:
    """A variant, as :class:`slidesparse.gemm.launch.Kernel` has it.

    Args:
        memory: The tensors that it may touch.
        tile: Its geometry.
        types: Of the operands and of the results.
        count_bits: Bits of a count, for weights in bundles.
        value_bits: Bits of a kept value.
        grouped: Whether it multiplies by the weights of many experts.
        edit: A text in the sources, and what replaces it.
        seed: Of the order in which its warps run.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        tile: AnyTile,
        types: tuple[torch.dtype, torch.dtype],
        count_bits: int = 0,
        value_bits: int = 8,
        grouped: bool = False,
        edit: tuple[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.memory, self.tile, self.types, self.seed = memory, tile, types, seed
        self.shared_bytes = tile.shared_bytes(types[0].itemsize, count_bits, value_bits)
        self.program = program(tile, *types, count_bits, value_bits, grouped, edit)

    def grid(self, tiles: int) -> int:
        """See :meth:`slidesparse.gemm.launch.Kernel.grid`."""
        return min(tiles, MULTIPROCESSORS) if self.tile.cluster == 1 else tiles * self.tile.cluster

    def launch(self, arguments: Arguments, grid: int, stream: int = 0) -> None:
        """See :meth:`slidesparse.gemm.launch.Kernel.launch`."""
        Machine(
            self.program,
            bytes(arguments),
            self.memory,
            threads=self.tile.threads,
            shared_bytes=self.shared_bytes,
            grid=grid,
            cluster=self.tile.cluster,
            seed=self.seed,
        ).run()


def run_product(
    x: Lifted,
    packed: PackedWeight,
    tile: AnyTile | tuple[Band, ...],
    out_dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
    edit: tuple[str, str] | None = None,
    seed: int = 0,
    backend: type[Hopper] = Hopper,
) -> torch.Tensor:
    """Return what the kernel computes of activations in slabs; ``backend`` decides on the form of the weight."""
    memory, (steps,) = GlobalMemory(), backend().prepare(packed)
    tokens, channels = x.values.shape[0], packed.shape[0]
    slabs = slab_view(x.values, SLABS).clone()
    y = torch.full((tokens * channels + GUARD,), 7.0, dtype=out_dtype)
    weight = WeightAddresses(
        memory.add(steps),
        None if packed.scale is None else memory.add(packed.scale),
        None if bias is None else memory.add(bias),
        0 if bias is None else BIAS_TYPES[bias.dtype],
    )

    def load(
        tile: AnyTile,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        device: int,
        count_bits: int,
        value_bits: int,
        _: bool,
    ) -> EmulatedKernel:
        return EmulatedKernel(memory, tile, (dtype, out_dtype), count_bits, value_bits, edit=edit, seed=seed)

    with patch.object(launch, "load_kernel", load), patch.object(launch, "current_stream", lambda device: 0):
        sizes = x.values.shape, x.values.dtype, backend().form_of(steps), steps.shape, channels, out_dtype
        launch._launch.cache_clear()  # it holds kernels with the memory of another product
        product = launch.find_launch(*sizes, 0, backend.choose, tile)
        product.launch(memory.add(slabs), None if x.scale is None else memory.add(x.scale), weight, memory.add(y))
        launch._launch.cache_clear()
    assert bool((y[tokens * channels :] == 7).all()), "the kernel wrote past its results"
    return y[: tokens * channels].view(tokens, channels)


def problem(
    pattern: str,
    dtype: torch.dtype,
    tokens: int,
    backend: type[Hopper] = Hopper,
    out: int = OUT,
    columns: int = COLUMNS,
    start: int = 0,
) -> tuple[Lifted, PackedWeight, torch.Tensor]:
    """Activations in slabs, a weight from a position in a group on, and the activations before they were lifted."""
    torch.manual_seed(tokens)
    weight = torch.randn(out, start + columns) * 30
    weight = (weight * prune_mask(weight, pattern)).to(dtype)[:, start:]
    weight = weight & -4 if backend.value_bits == 6 else weight
    packed = pack_by(weight, pattern, scale=torch.rand(out) if dtype.itemsize == 1 else None, k_offset=start)
    x = torch.randn(tokens, columns).to(dtype if dtype.itemsize == 2 else torch.float32)
    values, scale = quantize_lift(x, backend.layout.column_map(packed), dtype, "hopper")
    return Lifted(values, scale, None), packed, x


def expected(x: torch.Tensor, packed: PackedWeight, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """The product by definition, of what was neither packed nor lifted."""
    values, scale = quantize_rows(x, packed.dtype) if packed.dtype.itemsize == 1 else (x, None)
    return apply_scales(product(values, packed.unpack()), scale, packed.scale, bias, out_dtype)
