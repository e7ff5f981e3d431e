"""Products of the Hopper kernel against the reference, on a GPU: every form of a weight, every tile."""

from __future__ import annotations

import pytest
import torch
from gpu_products import assert_same_every_time, in_slabs, needs_hopper, packed_weight, tokens_of
from hopper_forms import Bundles, SixBitBundles
from tolerances import FP8_TENSOR_CORE, assert_product

from slidesparse import ops
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.kernel import load_kernels
from slidesparse.gemm.launch import Band
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.layer.linear import SlideLinear
from slidesparse.ops.matmul import matmul
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import quantize_rows

pytestmark = [pytest.mark.gpu, needs_hopper]

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
PATTERNS = ("2:4", "4:6", "6:8", "8:10", "14:16")
FORMS = [
    *((Hopper, pattern) for pattern in PATTERNS),
    *((Bundles, pattern) for pattern in ("4:6", "6:8", "8:10", "10:12", "12:14", "14:16")),
    *((HopperSixBits, pattern) for pattern in PATTERNS[:4]),
    *((SixBitBundles, pattern) for pattern in PATTERNS[1:]),
]
BACKENDS = (Hopper, Bundles, HopperSixBits)
TOKENS = (0, 1, 7, 64, 193, 1000)
OUT, COLUMNS = 300, 1000
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile all tiles at once, in parallel."""
    for count_bits in (0, 3, 4):
        load_kernels(TILES, INT8, BF16, 0, count_bits, 8)
        load_kernels(TILES, INT8, BF16, 0, count_bits, 6)
    load_kernels(DENSE_TILES, INT8, BF16, 0, 0, 6)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[tile for tile in TILES if tile.split > 1], ids=str)
def split_tile(request: pytest.FixtureRequest) -> Tile:
    """Every tile whose steps several blocks share."""
    chosen: Tile = request.param
    return chosen


def weight_of(
    backend: type[Hopper], pattern: str, out: int = OUT, columns: int = COLUMNS, k_offset: int = 0
) -> PackedWeight:
    return packed_weight(INT8, pattern, out, columns, bits=backend.value_bits, k_offset=k_offset)


def assert_exact(
    backend: type[Hopper],
    packed: PackedWeight,
    tile: Tile | tuple[Band, ...],
    tokens: tuple[int, ...] = TOKENS,
    out_dtype: torch.dtype = BF16,
) -> None:
    """The bits of the definition, with scales and a bias."""
    made, (out, columns) = backend(), packed.shape
    operand, weight, bias = made.prepare(packed), packed.unpack(), torch.randn(out, device="cuda")
    for m in tokens:
        x, scale_x = tokens_of(INT8, m, columns), torch.rand(m, 1, device="cuda")
        y = made.matmul(in_slabs(x, packed, backend), scale_x, operand, packed.scale, bias, out, out_dtype, tile)
        assert torch.equal(y, apply_scales(product(x, weight), scale_x, packed.scale, bias, out_dtype)), m


@pytest.mark.parametrize(("backend", "pattern"), FORMS)
def test_int8_has_the_bits_of_the_reference(backend: type[Hopper], pattern: str, tile: Tile) -> None:
    assert_exact(backend, weight_of(backend, pattern), tile)


@pytest.mark.parametrize(("out", "columns"), [(OUT, COLUMNS), (1, 128), (257, 36), (320, 18944), (3000, 512)])
def test_dense_six_bits_have_the_bits_of_the_reference(out: int, columns: int, dense_tile: Tile) -> None:
    packed = weight_of(HopperSixBits, "dense", out, columns)
    assert_exact(HopperSixBits, packed, dense_tile, TOKENS if columns < 2000 else (16, 200))


@pytest.mark.parametrize("out", [OUT, 320])  # stored number by number, and 16 bytes at a time
@pytest.mark.parametrize("out_dtype", [FP16, FP32], ids=str)
def test_other_outputs_have_the_bits_of_the_reference(out: int, out_dtype: torch.dtype, tile: Tile) -> None:
    assert_exact(Hopper, weight_of(Hopper, "6:8", out), tile, out_dtype=out_dtype)


@pytest.mark.parametrize(
    ("backend", "pattern"), [(Hopper, "6:8"), (HopperSixBits, "6:8"), (Bundles, "4:6"), (Bundles, "14:16")]
)
@pytest.mark.parametrize("columns", [60, 200, 500])
def test_a_split_cuts_a_row_anywhere(columns: int, backend: type[Hopper], pattern: str, split_tile: Tile) -> None:
    """Into more parts than there are steps, and within bundles."""
    assert_exact(backend, weight_of(backend, pattern, OUT, columns), split_tile, (3, 130))


@pytest.mark.parametrize(
    ("backend", "pattern"), [(HopperSixBits, "6:8"), *((Bundles, p) for p in ("4:6", "6:8", "8:10", "14:16"))]
)
def test_long_rows_fill_every_stage_and_slot_again_and_again(backend: type[Hopper], pattern: str, tile: Tile) -> None:
    assert_exact(backend, weight_of(backend, pattern, 320, 18944), tile, (16, 200))


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_walk_over_many_tiles(backend: type[Hopper], tile: Tile) -> None:
    assert_exact(backend, weight_of(backend, "6:8", 1500, 500), tile, (3000,))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out", [1, 63, 257, 320])
def test_any_number_of_channels_and_any_bias(out: int, backend: type[Hopper], tile: Tile) -> None:
    packed, made, x = weight_of(backend, "6:8", out, 256), backend(), tokens_of(INT8, 200, 256)
    for bias in (None, torch.randn(out, device="cuda").to(BF16), torch.randn(out, device="cuda").to(FP16)):
        y = made.matmul(in_slabs(x, packed, backend), None, made.prepare(packed), packed.scale, bias, out, BF16, tile)
        assert torch.equal(y, apply_scales(product(x, packed.unpack()), None, packed.scale, bias, BF16))


@pytest.mark.parametrize(
    ("backend", "pattern", "k_offset"),
    [(Hopper, "6:8", 3), *((Bundles, *cut) for cut in (("6:8", 3), ("4:6", 2), ("4:6", 4), ("6:8", 6)))],
)
def test_a_shard_that_starts_inside_a_group(backend: type[Hopper], pattern: str, k_offset: int, tile: Tile) -> None:
    assert_exact(backend, weight_of(backend, pattern, OUT, 777, k_offset), tile, (100,))


LARGE = tuple(tile for tile in TILES if tile.channels == 256 and tile.split == 1)
REST = tuple(
    tile for tile in TILES if str(tile) in ("64x64b2", "64x128", "128x128", "128x128/2", "96x256", "160x256/2")
)


@pytest.mark.parametrize("rest", REST, ids=str)
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_two_bands_are_one_product(large: Tile, rest: Tile) -> None:
    for backend, dtype, pattern, out, out_dtype in (
        (Hopper, INT8, "6:8", 300, BF16),
        (Hopper, INT8, "4:6", 2560, FP32),
        (Hopper, FP8, "2:4", 2563, FP16),
        (HopperSixBits, INT8, "6:8", 1300, BF16),
    ):
        packed, made = packed_weight(dtype, pattern, out, COLUMNS, bits=backend.value_bits), backend()
        operand, bias = made.prepare(packed), torch.randn(out, device="cuda").to(out_dtype)
        bands = Band(large, 256), Band(rest, out - 256)
        for m in (1, 200, 1000):
            x, scale_x = tokens_of(dtype, m, COLUMNS), torch.rand(m, 1, device="cuda")
            found, first, second = (
                made.matmul(in_slabs(x, packed, backend), scale_x, operand, packed.scale, bias, out, out_dtype, tile)
                for tile in (bands, large, rest)
            )
            assert torch.equal(found, torch.cat([first[:, :256], second[:, 256:]], 1))


def test_two_bands_of_a_dense_weight_are_one_product(dense_tile: Tile) -> None:
    bands = Band(next(iter(DENSE_TILES)), 512), Band(dense_tile, 788)
    assert_exact(HopperSixBits, weight_of(HopperSixBits, "dense", 1300), bands, (200,))


def test_a_second_band_waits_for_what_both_read_and_holds_up_what_follows() -> None:
    # Three linears on the products of one another: whichever band or lift started too early would read old numbers.
    sizes, tokens, backend = [(37888, 512), (512, 37888), (2560, 512)], 384, Hopper()
    large, rest = (next(tile for tile in TILES if str(tile) == name) for name in ("192x256", "96x128"))
    packed = [packed_weight(INT8, "6:8", out, columns) for out, columns in sizes]
    operands = [backend.prepare(weight) for weight in packed]
    maps = [Hopper.layout.column_map(weight) for weight in packed]

    def linears(x: torch.Tensor, two: bool) -> torch.Tensor:
        for (out, _), weight, operand, columns in zip(sizes, packed, operands, maps, strict=True):
            first = 256 * max(1, out // 256 - 3)
            tile = (Band(large, first), Band(rest, out - first)) if two and first < out else large
            values, scale = ops.quantize_lift(x, columns, INT8, "hopper")
            x = backend.matmul(values, scale, operand, weight.scale, None, out, BF16, tile)
        return x

    given = torch.randn(tokens, sizes[0][1], device="cuda").to(BF16)
    linears(given, True), linears(given, False)  # compile and load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linears(given, True)
    for _ in range(100):
        given.copy_(torch.randn_like(given))
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, linears(given, False))


@pytest.mark.parametrize(
    ("backend", "pattern", "dtype"),
    [
        *((Hopper, pattern, dtype) for pattern in PATTERNS for dtype in (FP8, BF16, FP16)),
        *((Bundles, pattern, FP8) for pattern in ("4:6", "6:8")),
    ],
)
def test_floats_stay_within_the_table(backend: type[Hopper], pattern: str, dtype: torch.dtype, tile: Tile) -> None:
    packed, made = packed_weight(dtype, pattern, OUT, COLUMNS), backend()
    operand, bias = made.prepare(packed), torch.randn(OUT, device="cuda") * 1e-2
    weight, scale_w = packed.unpack().double(), packed.scale
    for m in TOKENS:
        x = tokens_of(dtype, m, COLUMNS)
        scale_x = torch.rand(m, 1, device="cuda") if scale_w is not None else None
        y = made.matmul(in_slabs(x, packed, backend), scale_x, operand, scale_w, bias, OUT, BF16, tile)
        scale = 1.0 if scale_x is None or scale_w is None else scale_x.double() * scale_w.double()
        exact = scale * (x.double() @ weight.T) + bias.double()
        magnitude = scale * (x.double().abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
@pytest.mark.parametrize("dtype", [INT8, FP8, BF16, FP16], ids=str)
def test_a_product_without_a_layer(dtype: torch.dtype, pattern: str) -> None:
    packed, bias = packed_weight(dtype, pattern, OUT, COLUMNS), torch.randn(OUT, device="cuda") * 1e-2
    weight, source = packed.unpack().double(), BF16 if dtype.itemsize == 1 else dtype
    for m in TOKENS:
        x = torch.randn(m, COLUMNS, device="cuda").to(source)
        y = matmul(x, packed, bias, out_dtype=FP32)
        assert torch.equal(y, matmul(x, packed, bias, out_dtype=FP32, backend="hopper"))
        values, scale = x.double(), torch.ones(1, dtype=torch.float64, device="cuda")
        if packed.scale is not None:
            rows = quantize_rows(x, dtype)
            values, scale = rows.values.double(), rows.scale.double() * packed.scale.double()
        exact = scale * (values @ weight.T) + bias.double()
        magnitude = scale * (values.abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


@pytest.mark.parametrize(("backend", "pattern"), [(Hopper, "6:8"), *((Bundles, p) for p in ("4:6", "6:8", "14:16"))])
def test_the_kernels_lift_what_the_product_reads(backend: type[Hopper], pattern: str) -> None:
    packed, made = weight_of(backend, pattern, OUT, 3072), backend()
    order, operand, column_map = made.layout.order(packed), made.prepare(packed), made.layout.column_map(packed)
    assert order is not None
    reference = SlideLinear(packed, backend="reference")
    for m in (1, 64, 700):
        x = torch.randn(m, 3072, dtype=BF16, device="cuda")
        values, scale = ops.quantize_lift(x, column_map, INT8, "hopper", order.numbers)
        y = made.matmul(values, scale, operand, packed.scale, None, OUT, BF16)
        assert torch.equal(y, reference(x))


@pytest.mark.parametrize("pattern", ["6:8", "dense"])
def test_auto_takes_the_backend_that_keeps_six_bits(pattern: str) -> None:
    layer = SlideLinear(weight_of(HopperSixBits, pattern), fallback="none")
    assert layer.choice.backends == ("hopper-6bit",)


@pytest.mark.parametrize("out", [OUT, 320])
def test_every_output_is_written(out: int) -> None:
    packed, backend = packed_weight(INT8, "6:8", out, COLUMNS), Hopper()
    x, operand = in_slabs(tokens_of(INT8, 777, COLUMNS), packed), backend.prepare(packed)
    expected = backend.matmul(x, None, operand, packed.scale, None, out, BF16)
    for _ in range(3):  # the allocator gives the memory of the one before, poisoned
        poison = torch.full_like(expected, float("nan"))
        address = poison.data_ptr()
        del poison
        y = backend.matmul(x, None, operand, packed.scale, None, out, BF16)
        assert y.data_ptr() == address
        assert torch.equal(y, expected)
        del y


@pytest.mark.parametrize(
    ("backend", "dtype", "pattern"),
    [
        *((backend, dtype, "6:8") for backend in (Hopper, Bundles) for dtype in (INT8, FP8)),
        *((HopperSixBits, INT8, pattern) for pattern in ("6:8", "dense")),
    ],
)
@pytest.mark.parametrize("tokens", [64, 1500])
def test_ten_thousand_launches_give_the_same_bits(
    backend: type[Hopper], dtype: torch.dtype, pattern: str, tokens: int
) -> None:
    packed, made = packed_weight(dtype, pattern, 1024, 2048, bits=backend.value_bits), backend()
    x, operand = in_slabs(tokens_of(dtype, tokens, 2048), packed, backend), made.prepare(packed)
    assert_same_every_time(lambda: made.matmul(x, None, operand, packed.scale, None, 1024, BF16), 10_000)


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
def test_a_split_sums_in_the_same_order_every_time(dtype: torch.dtype, split_tile: Tile) -> None:
    packed, backend = packed_weight(dtype, "4:6", 1024, 2000), Hopper()
    x, operand = in_slabs(tokens_of(dtype, 100, 2000), packed), backend.prepare(packed)
    given = x, None, operand, packed.scale, None, 1024, FP32, split_tile
    assert_same_every_time(lambda: backend.matmul(*given), 1000)
