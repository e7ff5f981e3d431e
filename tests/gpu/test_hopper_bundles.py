"""Weights in bundles on a Hopper GPU: products are those of the reference, whatever a bundle holds, wherever cut."""

from __future__ import annotations

import hopper_emulator as emulator
import numpy as np
import pytest
import torch
from fused_lifts import quantize_lift
from gpu_products import in_slabs, needs_hopper, tokens_of
from hopper_forms import Bundles
from slab_views import slab_view
from tolerances import FP8_TENSOR_CORE, assert_product

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.kernel import load_kernels
from slidesparse.gemm.hopper.tiles import TILES, Tile
from slidesparse.gemm.hopper.weights import SLABS
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.quant import quantize_rows

pytestmark = [pytest.mark.gpu, needs_hopper]

INT8, FP8, BF16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32
PATTERNS = ("4:6", "6:8", "8:10", "10:12", "12:14", "14:16")
TOKENS = (1, 7, 64, 193, 1000)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile all tiles at once, in parallel."""
    for count_bits in (3, 4):
        load_kernels(TILES, INT8, BF16, 0, count_bits, 8)
    load_kernels(TILES, FP8, BF16, 0, 3, 8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def packed_weight(dtype: torch.dtype, pattern: str, out: int, columns: int, k_offset: int = 0) -> PackedWeight:
    whole = torch.randint(-128, 128, (out, k_offset + columns), device="cuda").to(torch.float32)
    whole = whole / (1 if dtype == INT8 else 64)
    weight = (whole * prune_mask(whole, pattern)).to(dtype)[:, k_offset:].contiguous()
    scale = torch.rand(out, device="cuda") * 1e-3
    return pack_by(weight, pattern, scale=scale, k_offset=k_offset)


def assert_exact(packed: PackedWeight, tile: Tile, tokens: tuple[int, ...] = TOKENS) -> None:
    backend, (out, columns) = Bundles(), packed.shape
    operand, weight, bias = backend.prepare(packed), packed.unpack(), torch.randn(out, device="cuda")
    assert operand[0].dim() == 3
    for m in tokens:
        x, scale_x = tokens_of(INT8, m, columns), torch.rand(m, 1, device="cuda")
        y = backend.matmul(in_slabs(x, packed, Bundles), scale_x, operand, packed.scale, bias, out, BF16, tile)
        assert torch.equal(y, apply_scales(product(x, weight), scale_x, packed.scale, bias, BF16)), m


@pytest.mark.parametrize("pattern", PATTERNS)
def test_int8_has_the_bits_of_the_reference(pattern: str, tile: Tile) -> None:
    assert_exact(packed_weight(INT8, pattern, 300, 1000), tile)


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "8:10", "14:16"])
def test_long_rows_fill_every_slot_again_and_again(pattern: str, tile: Tile) -> None:
    assert_exact(packed_weight(INT8, pattern, 320, 18944), tile, (16, 200))


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "8:10"])
def test_blocks_walk_over_many_tiles(pattern: str, tile: Tile) -> None:
    assert_exact(packed_weight(INT8, pattern, 1500, 500), tile, (3000,))


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "14:16"])
@pytest.mark.parametrize("columns", [60, 200, 500])
def test_a_split_cuts_bundles_anywhere(columns: int, pattern: str) -> None:
    packed = packed_weight(INT8, pattern, 300, columns)
    for tile in TILES:
        if tile.split > 1:
            assert_exact(packed, tile, (3, 130))


@pytest.mark.parametrize("out", [1, 63, 257, 320])
def test_any_number_of_channels(out: int, tile: Tile) -> None:
    assert_exact(packed_weight(INT8, "6:8", out, 256), tile, (200,))


@pytest.mark.parametrize(("pattern", "k_offset"), [("6:8", 3), ("4:6", 2), ("4:6", 4), ("6:8", 6)])
def test_a_shard_that_starts_inside_a_group(pattern: str, k_offset: int) -> None:
    packed = packed_weight(INT8, pattern, 300, 777, k_offset)
    for tile in TILES:
        assert_exact(packed, tile, (100,))


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_fp8_stays_within_the_table(pattern: str, tile: Tile) -> None:
    packed, backend = packed_weight(FP8, pattern, 300, 1000), Bundles()
    operand, weight, scale_w = backend.prepare(packed), packed.unpack().double(), packed.scale
    for m in TOKENS:
        x, scale_x = tokens_of(FP8, m, 1000), torch.rand(m, 1, device="cuda")
        y = backend.matmul(in_slabs(x, packed, Bundles), scale_x, operand, scale_w, None, 300, BF16, tile)
        scale = scale_x.double() * scale_w.double()
        exact, magnitude = (scale * (a @ b.T) for a, b in ((x.double(), weight), (x.double().abs(), weight.abs())))
        assert_product(y, exact, magnitude, FP8, FP8_TENSOR_CORE)


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "14:16"])
def test_the_kernels_lift_what_the_product_reads(pattern: str) -> None:
    packed, backend = packed_weight(INT8, pattern, 300, 3072), Bundles()
    order, operand, weight = backend.layout.order(packed), backend.prepare(packed), packed.unpack()
    assert order is not None
    for m in (1, 64, 700):
        x = torch.randn(m, 3072, dtype=BF16, device="cuda")
        values, scale, _ = quantize_lift(x, order, INT8, slabs=SLABS)
        y = backend.matmul(values, scale, operand, packed.scale, None, 300, BF16)
        exact = quantize_rows(x, INT8)
        assert torch.equal(y, apply_scales(product(exact.values, weight), exact.scale, packed.scale, None, BF16))


def test_the_emulator_reads_what_the_kernel_reads() -> None:
    for pattern in ("4:6", "6:8", "14:16"):
        packed, backend = packed_weight(INT8, pattern, 70, 320), Bundles()
        operand = backend.prepare(packed)
        decoded = emulator.weights(operand[0].cpu().numpy(), 1)
        # One token a column of K': the product is the operand itself, element by element.
        width = decoded.shape[1]
        x = SLABS.arrange(torch.eye(width, device="cuda").to(INT8)).view(-1, width)[:width]
        assert slab_view(x, SLABS).shape[1] == width
        y = backend.matmul(x, None, operand, None, None, 70, FP32)
        assert torch.equal(y.T, torch.from_numpy(decoded[:70].view(np.int8).copy()).cuda().float())


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("tokens", [16, 100, 1500])
def test_many_launches_and_graphs_give_the_same_bits(dtype: torch.dtype, tokens: int) -> None:
    packed, backend = packed_weight(dtype, "6:8", 1024, 2048), Bundles()
    x, operand = in_slabs(tokens_of(dtype, tokens, 2048), packed, Bundles), backend.prepare(packed)

    def run() -> torch.Tensor:
        return backend.matmul(x, None, operand, packed.scale, None, 1024, BF16)

    expected = run()
    assert torch.isfinite(expected).all()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        different += (run().view(torch.int16) != expected.view(torch.int16)).any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(10)]
    for _ in range(50):
        graph.replay()
        different += sum((y.view(torch.int16) != expected.view(torch.int16)).any() for y in captured)
    assert int(different) == 0


def test_both_forms_give_the_same_product() -> None:
    packed, x = packed_weight(INT8, "6:8", 3584, 3584), tokens_of(INT8, 300, 3584)
    ours, plain = (
        backend().matmul(in_slabs(x, packed, backend), None, backend().prepare(packed), packed.scale, None, 3584, BF16)
        for backend in (Bundles, Hopper)
    )
    assert torch.equal(ours, plain)
    assert Bundles().prepare(packed)[0].nbytes < 0.91 * Hopper().prepare(packed)[0].nbytes
