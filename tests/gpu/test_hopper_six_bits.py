"""INT8 weights of six bits on a Hopper GPU: products are those of the reference, for every pattern, tile and size."""

from __future__ import annotations

import pytest
import torch
from gpu_products import assert_same_every_time, in_slabs, needs_hopper
from hopper_forms import SixBitBundles

from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.choose_tiles import Band
from slidesparse.gemm.hopper.kernel import load_kernels
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.layer.linear import SlideLinear
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by

pytestmark = [pytest.mark.gpu, needs_hopper]

INT8, BF16 = torch.int8, torch.bfloat16
PATTERNS = ("2:4", "4:6", "6:8", "8:10")
TOKENS = (1, 7, 64, 193, 1000)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile all tiles at once, in parallel."""
    for count_bits in (0, 3, 4):
        load_kernels(TILES, INT8, BF16, 0, count_bits, 6)
    load_kernels(DENSE_TILES, INT8, BF16, 0, 0, 6)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def packed_weight(pattern: str, out: int, columns: int) -> PackedWeight:
    whole = torch.randint(-32, 32, (out, columns), device="cuda").to(torch.float32) * 4
    weight = (whole * prune_mask(whole, pattern)).to(INT8)
    return pack_by(weight, pattern, scale=torch.rand(out, device="cuda") * 1e-3)


def assert_exact(
    packed: PackedWeight,
    tile: Tile | tuple[Band, ...],
    tokens: tuple[int, ...] = TOKENS,
    kind: type[Hopper] = HopperSixBits,
) -> None:
    backend, (out, columns) = kind(), packed.shape
    operand, weight, bias = backend.prepare(packed), packed.unpack(), torch.randn(out, device="cuda")
    for m in tokens:
        x = torch.randint(-128, 128, (m, columns), dtype=INT8, device="cuda")
        scale_x = torch.rand(m, 1, device="cuda")
        y = backend.matmul(in_slabs(x, packed, kind), scale_x, operand, packed.scale, bias, out, BF16, tile)
        assert torch.equal(y, apply_scales(product(x, weight), scale_x, packed.scale, bias, BF16)), m


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_product_has_the_bits_of_the_reference(pattern: str, tile: Tile) -> None:
    assert_exact(packed_weight(pattern, 300, 1000), tile)


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "8:10", "14:16"])
def test_counts_stand_beside_six_bits(pattern: str, tile: Tile) -> None:
    assert_exact(packed_weight(pattern, 300, 1000), tile, kind=SixBitBundles)


@pytest.mark.parametrize(("out", "columns"), [(300, 1000), (1, 128), (257, 36), (320, 18944), (3000, 512)])
def test_a_dense_product_has_the_bits_of_the_reference(out: int, columns: int, dense_tile: Tile) -> None:
    assert_exact(packed_weight("dense", out, columns), dense_tile, TOKENS if columns < 2000 else (16, 200))


def test_long_rows_use_every_stage_again_and_again(tile: Tile) -> None:
    assert_exact(packed_weight("6:8", 320, 18944), tile, (16, 200))


def test_blocks_walk_over_many_tiles(tile: Tile) -> None:
    assert_exact(packed_weight("6:8", 1500, 500), tile, (3000,))


@pytest.mark.parametrize("out", [1, 63, 257, 320])
def test_any_number_of_channels(out: int, tile: Tile) -> None:
    assert_exact(packed_weight("6:8", out, 256), tile, (200,))


@pytest.mark.parametrize("rest", TILES, ids=str)
def test_two_bands_are_one_product(rest: Tile) -> None:
    large = next(iter(TILES))
    assert_exact(packed_weight("6:8", 1300, 1000), (Band(large, 512), Band(rest, 788)), (200,))


def test_two_bands_of_a_dense_weight_are_one_product(dense_tile: Tile) -> None:
    large = next(iter(DENSE_TILES))
    assert_exact(packed_weight("dense", 1300, 1000), (Band(large, 512), Band(dense_tile, 788)), (200,))


@pytest.mark.parametrize("pattern", ["6:8", "dense"])
def test_auto_takes_the_backend_that_keeps_six_bits(pattern: str) -> None:
    packed = packed_weight(pattern, 512, 1024)
    layer, exact = (SlideLinear(packed, backend=name, fallback="none") for name in ("auto", "reference"))
    assert layer.choice.backends == ("hopper-6bit",)
    for tokens in TOKENS:
        x = torch.randn(tokens, 1024, device="cuda", dtype=BF16)
        assert torch.equal(layer(x), exact(x)), tokens


@pytest.mark.parametrize("pattern", ["6:8", "dense"])
def test_ten_thousand_launches_give_the_same_bits(pattern: str) -> None:
    packed = packed_weight(pattern, 3584, 3584)
    backend, x = HopperSixBits(), torch.randint(-128, 128, (64, 3584), dtype=INT8, device="cuda")
    x, scale_x, operand = in_slabs(x, packed, HopperSixBits), torch.rand(64, 1, device="cuda"), backend.prepare(packed)
    assert_same_every_time(lambda: backend.matmul(x, scale_x, operand, packed.scale, None, 3584, BF16), 10_000)
