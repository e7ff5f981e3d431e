"""The quantise-and-lift kernel against its torch definition, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fused_lifts import quantize_lift
from slab_views import slab_view

from slidesparse.errors import InputError
from slidesparse.lifting import kernel as kernels
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.launch import Launch
from slidesparse.lifting.layout import BUNDLE, ColumnOrder, Layout, LiftSpec, LinearTensors, Slabs, column_map
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather
from slidesparse.weights.support import as_bits

# numpy warns of what these rows are made to do: overflow 127 / absmax, multiply 0 by infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SLABS = Slabs()


def packed_weight(pattern: str, columns: int, k_offset: int = 0) -> PackedWeight:
    """A weight of that pattern, for its column order."""
    return pack_by(torch.zeros(1, columns, dtype=torch.int8), pattern, k_offset=k_offset)


def expected(x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype, multiple: int = 1) -> tuple[torch.Tensor, ...]:
    values, scale = quantize_rows(x, dtype)
    return gather(values, packed.column_map(multiple).to(x.device)), scale


def on(device: str, packed: PackedWeight, multiple: int = 1) -> ColumnOrder:
    return ColumnOrder.of(packed.to(device), multiple)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(as_bits(got), as_bits(wanted))


def assert_same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    assert same_bits(got[0], wanted[0])
    assert same_bits(got[1], wanted[1])


def rows(columns: int) -> torch.Tensor:
    """Rows of every kind: float32 [8, columns]."""
    gaussian = torch.randn(8, columns)
    gaussian[1] = 0.0
    gaussian[2] *= 1e-3
    gaussian[3, columns // 2] = 3e4  # an outlier
    gaussian[4] = -0.0
    gaussian[4, 0] = 2.0
    gaussian[5] = torch.arange(columns) - columns / 2  # ties once divided
    gaussian[6] *= 1e-39  # subnormal: 127 / absmax overflows
    gaussian[7] *= 1e-5
    return gaussian


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A chunk has 64 columns and a step writes 128: rows of more than 512 columns are walked, in steps of 64."""
    kernels.find_kernel_lift.cache_clear()
    monkeypatch.setattr(kernels, "configure", lambda *_: Launch(read=64, write=128, num_warps=1))
    yield
    kernels.find_kernel_lift.cache_clear()


# -- the column order ----------------------------------------------------------------------------------------------


def orders() -> Iterator[tuple[str, int, int, int]]:
    """Pattern, K, k_offset, multiple."""
    for pattern, group in [("2:4", 4), ("4:6", 6), ("6:8", 8), ("14:16", 16), ("dense", 4)]:
        yield pattern, 4 * group, 0, 1  # whole units
        yield pattern, 4 * group + group // 2 + 1, 0, 32  # a cut group, more than one unit, an odd K
        yield pattern, 5 * group, 2, 64
        yield pattern, 3 * group + 1, group - 1, 1  # an odd offset


@pytest.mark.parametrize(("pattern", "columns", "k_offset", "multiple"), list(orders()))
def test_every_order_matches_the_column_map(
    device: str, pattern: str, columns: int, k_offset: int, multiple: int
) -> None:
    packed = packed_weight(pattern, columns, k_offset)
    x = torch.randn(2, columns, dtype=torch.bfloat16, device=device)
    got = quantize_lift(x, on(device, packed, multiple), torch.int8)
    assert_same(got, expected(x, packed, torch.int8, multiple))


@pytest.mark.parametrize("k_offset", [0, 2, 3])
@pytest.mark.parametrize("columns", [65, 500, 512, 1100])
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
def test_held_and_walked_rows_agree_with_the_definition(
    device: str, small_steps: None, pattern: str, columns: int, k_offset: int
) -> None:
    # From one chunk to more than can be held; an odd offset is never held.
    packed = packed_weight(pattern, columns, k_offset)
    x = torch.randn(2, columns, dtype=torch.bfloat16, device=device)
    assert_same(quantize_lift(x, on(device, packed, 32), torch.int8), expected(x, packed, torch.int8, 32))


@pytest.mark.parametrize("prologue", ["rms_norm", "add_rms_norm", "add_gemma_norm", "silu_mul"])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_walked_rows_are_held_rows(
    device: str, monkeypatch: pytest.MonkeyPatch, prologue: str, dtype: torch.dtype
) -> None:
    packed = packed_weight("6:8", 700)
    x, residual = torch.randint(-40, 41, (2, 2, 700)).div(8).to(device, torch.bfloat16).unbind(0)
    norm_weight = torch.randn(700).to(device, torch.bfloat16)
    given = (
        {"x": torch.cat([x, residual], 1)}
        if prologue == "silu_mul"
        else {"x": x, "norm_weight": norm_weight, "eps": 1e-6}
    )
    given |= {"residual": residual} if prologue.startswith("add") else {}
    results = []
    for read in (1024, 64):  # held in one chunk, and walked
        kernels.find_kernel_lift.cache_clear()
        monkeypatch.setattr(kernels, "configure", lambda *_, read=read: Launch(read, 256, 1))
        results.append(quantize_lift(order=on(device, packed, 32), target=dtype, prologue=prologue, **given))
    kernels.find_kernel_lift.cache_clear()
    for one, other in zip(*results, strict=True):
        assert one is None if other is None else same_bits(one, other)


# -- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_kind_of_row(device: str, source: torch.dtype, dtype: torch.dtype) -> None:
    packed = packed_weight("6:8", 64)
    x = rows(64).to(device, source)
    assert_same(quantize_lift(x, on(device, packed), dtype), expected(x, packed, dtype))


@pytest.mark.parametrize("read", [64, 8])  # held, and walked
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_kind_of_row_as_sglang_quantises(
    device: str, monkeypatch: pytest.MonkeyPatch, source: torch.dtype, dtype: torch.dtype, read: int
) -> None:
    kernels.find_kernel_lift.cache_clear()
    monkeypatch.setattr(kernels, "configure", lambda *_: Launch(read, 128, 1))
    packed, x = packed_weight("6:8", 66), rows(66).to(device, source)
    x[7] = (torch.arange(66) % 64 - 31.5).to(x)  # ties, with the last of 63.5
    x[7, 0] = 127.0
    values, scale, _ = quantize_lift(x, on(device, packed), dtype, activation_rounding="sglang")
    kernels.find_kernel_lift.cache_clear()
    wanted, wanted_scale = quantize_rows(x, dtype, "sglang")
    if device == "cpu":
        assert_same((values, scale), (gather(wanted, packed.column_map()), wanted_scale))
        return
    torch.testing.assert_close(scale, wanted_scale, rtol=2.0**-22, atol=1e-44)  # it divides as SGLang does
    other = values.float() != gather(wanted, packed.column_map().to(device)).float()
    assert other.float().mean() < 0.01


def test_fp8_divides_exactly(device: str) -> None:
    # Quotients at and beside the boundaries between two e4m3 numbers, where a multiplication by 1 / scale goes astray.
    absmax = torch.rand(6, 1) * 8 + 0.5
    scale = absmax / 448.0
    halfway = torch.arange(1, 32, 2) * 2.0 ** torch.tensor([-7, 0, 3]).unsqueeze(1)
    exact = (halfway.flatten() * scale).repeat(1, 3)
    bits = exact.view(torch.int32) + torch.tensor([-1, 0, 1]).repeat_interleave(halfway.numel())
    x = torch.cat([absmax, bits.view(torch.float32)], 1).to(device)
    x = torch.nn.functional.pad(x, (0, 144 - x.shape[1]))
    packed = packed_weight("2:4", 144)
    assert (x.abs().amax(1, keepdim=True) == absmax.to(device)).all()
    assert_same(quantize_lift(x, on(device, packed), torch.float8_e4m3fn), expected(x, packed, torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_fault_shows_in_its_scale_and_nowhere_else(device: str, dtype: torch.dtype, fault: float) -> None:
    packed = packed_weight("2:4", 16)
    x = torch.randn(3, 16, device=device)
    x[1, 7] = fault
    values, scale, _ = quantize_lift(x, on(device, packed), dtype)
    wanted = expected(x, packed, dtype)
    assert bool(torch.isfinite(scale[1]).all()) is False
    for row in (0, 2):
        assert same_bits(values[row], wanted[0][row])
        assert same_bits(scale[row], wanted[1][row])


@pytest.mark.parametrize("source", FLOATS)
def test_lift_alone_moves_bits(device: str, source: torch.dtype) -> None:
    packed = packed_weight("4:6", 40)
    x = rows(40)[3:6].to(source)
    x[0, 3], x[1, 4] = float("nan"), float("-inf")
    x = x.to(device)
    lifted = quantize_lift(x, on(device, packed, 16), source)[0]
    assert same_bits(lifted, gather(x, packed.column_map(16).to(device)))


# -- shapes and strides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_any_number_of_tokens(device: str, tokens: int) -> None:
    packed = packed_weight("2:4", 20)
    x = torch.randn(tokens, 20, dtype=torch.bfloat16, device=device)
    assert_same(quantize_lift(x, on(device, packed), torch.int8), expected(x, packed, torch.int8))


def test_a_linears_lift_takes_any_strides(device: str) -> None:
    packed = packed_weight("6:8", 64)
    order, where = on(device, packed), torch.randn(1, device=device).device
    x, residual = (torch.randn(64, 5, device=device).T for _ in range(2))
    tensors = LinearTensors(packed.column_map(), (), None, None, torch.ones(64, device=device))
    spec = LiftSpec("add_rms_norm", x.dtype, torch.int8, tuple(order.numbers), Layout())
    lift = kernels.find_kernel_lift(spec, 5, where)
    wanted = lift(x.contiguous(), residual.contiguous(), tensors, 1e-6)
    assert all(torch.equal(*both) for both in zip(lift(x, residual, tensors, 1e-6), wanted, strict=True))


def test_one_variant_serves_all_rows(device: str) -> None:
    # On a GPU the second call launches what the first compiled; unaligned rows must not get it, nor make it unfit.
    packed = packed_weight("6:8", 64)
    columns = on(device, packed)
    for tokens, stride, start in [(5, 64, 0), (1, 64, 0), (40, 80, 16), (5, 72, 0), (5, 96, 3), (7, 64, 0)]:
        x = torch.randn(tokens, stride, dtype=torch.bfloat16, device=device)[:, start : start + 64]
        assert_same(quantize_lift(x, columns, torch.int8), expected(x, packed, torch.int8))


def in_slabs(values: torch.Tensor) -> torch.Tensor:
    """The definition of the slab layout: bytes [M, K'] -> [K' / 128, M padded with its last row, 128], swizzled."""
    rows = values.view(torch.uint8)
    padded = torch.cat([rows, rows[-1:].expand(-len(rows) % 8, -1)])
    chunks = padded.unflatten(-1, (-1, 8, 16)).transpose(0, 1)
    row, chunk = torch.arange(len(padded)).unsqueeze(1), torch.arange(8).unsqueeze(0)
    swizzled = torch.zeros_like(chunks)
    swizzled[:, row, chunk ^ row % 8] = chunks[:, row, chunk]
    return swizzled.flatten(-2)


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.bfloat16])
def test_slabs_hold_the_same_bytes(device: str, pattern: str, dtype: torch.dtype) -> None:
    packed = packed_weight(pattern, 90)
    x = torch.randn(9, 90, dtype=torch.bfloat16, device=device)
    got = quantize_lift(x, on(device, packed, 128), dtype, slabs=SLABS)[0]
    if dtype == torch.bfloat16:
        wanted = gather(x, packed.column_map(128).to(device))
    else:
        wanted = expected(x, packed, dtype, 128)[0]
    assert got.shape == wanted.shape
    assert torch.equal(slab_view(got, SLABS).view(torch.uint8).cpu(), in_slabs(wanted.cpu()))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize(
    ("pattern", "columns", "k_offset"),
    [
        *((pattern, 1100, 0) for pattern in ("4:6", "8:10", "14:16")),
        ("4:6", 192, 0),  # one whole bundle
        ("6:8", 510, 2),
        ("6:8", 511, 1),  # pairs do not stay pairs: the walking kernel
        ("6:8", 1024, 4),
        ("8:10", 6400, 0),  # several chunks
    ],
)
def test_bundles_have_the_columns_of_their_map(
    device: str, pattern: str, columns: int, k_offset: int, dtype: torch.dtype
) -> None:
    packed = packed_weight(pattern, columns, k_offset).to(device)
    order = ColumnOrder.of(packed, 128, BUNDLE)
    x = torch.randn(3, columns, dtype=torch.bfloat16, device=device)
    got, (values, scale) = quantize_lift(x, order, dtype, slabs=SLABS), quantize_rows(x, dtype)
    assert torch.equal(got.scale, scale)
    wanted = SLABS.arrange(gather(values, column_map(packed, 128, BUNDLE)))
    assert torch.equal(slab_view(got.values, SLABS).view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 65])
def test_slabs_are_arranged_in_torch_as_well(tokens: int, dtype: torch.dtype) -> None:
    values = torch.randn(tokens, 384).mul(9).to(dtype)
    got = SLABS.arrange(values)
    assert tuple(got.shape) == SLABS.shape(tokens, 384, dtype.itemsize)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), in_slabs(values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_offsets_beyond_two_to_the_31() -> None:
    packed = packed_weight("6:8", 37888)
    x = torch.randn(65536, 37888, dtype=torch.bfloat16, device="cuda")
    values, scale, _ = quantize_lift(x, on("cuda", packed, 32), torch.int8)
    assert values.numel() > 2**31
    for part in (slice(0, 4), slice(-4, None)):
        assert_same((values[part], scale[part]), expected(x[part], packed, torch.int8, 32))


# -- fused with what comes before ----------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, offset: int = 0) -> torch.Tensor:
    """The definition with square roots that are right to the last bit; in the type of the norm_weight."""
    wide = x.to(torch.float32)
    mean = wide.square().sum(-1, keepdim=True) / torch.tensor(float(x.shape[-1]), device=x.device)
    # torch's float32 square root is not always the nearest number on a CPU; through float64 it is.
    rstd = torch.ones_like(mean) / (mean + eps).to(torch.float64).sqrt().to(torch.float32)
    return (wide * rstd * (norm_weight.to(torch.float32) + offset)).to(norm_weight.dtype)


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("norm", ["rms_norm", "gemma_norm"])
def test_rms_norm_first(
    device: str, pattern: str, dtype: torch.dtype, source: torch.dtype, with_residual: bool, norm: str
) -> None:
    packed = packed_weight(pattern, 70)
    # Small multiples of 1/8: their squares add up exactly in any order, so that nothing but rounding is left to differ.
    x, residual = (torch.randint(-40, 41, (2, 3, 70)) / 8).to(device, source).unbind(0)
    norm_weight = torch.randn(70).to(device, source)
    total = x.to(torch.float32) + residual.to(torch.float32) if with_residual else x
    wanted = expected(rms_norm(total, norm_weight, 1e-6, int(norm == "gemma_norm")), packed, dtype)
    before, columns = residual.clone(), on(device, packed)
    if with_residual:
        *got, after = quantize_lift(
            x, columns, dtype, f"add_{norm}", norm_weight=norm_weight, residual=residual, eps=1e-6
        )
        assert same_bits(after, total.to(source))
        assert same_bits(residual, before)
    else:
        got = quantize_lift(x, columns, dtype, norm, norm_weight=norm_weight, eps=1e-6)
    assert_same(got, wanted)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("source", FLOATS)
def test_silu_mul_first(device: str, dtype: torch.dtype, source: torch.dtype) -> None:
    packed = packed_weight("6:8", 50)
    # Where exp(-gate) is 0, far below one unit of 1.0, or infinite, silu is gate or -0 without rounding.
    gate = torch.tensor([0.0, 17.5, 33.0, 60.0, -200.0])[torch.randint(0, 5, (4, 50))].to(device, source)
    up = torch.randn(4, 50).to(device, source)
    silu = torch.where(gate <= 0, -torch.zeros_like(gate), gate)
    silu = torch.where(gate == 0, torch.zeros_like(gate), silu)
    wanted = expected(silu * up, packed, dtype)
    assert_same(quantize_lift(torch.cat([gate, up], 1), on(device, packed), dtype, "silu_mul"), wanted)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_silu_of_ordinary_values(device: str, small_steps: None, dtype: torch.dtype) -> None:
    packed = packed_weight("6:8", 1100)
    x = torch.randn(2, 2200, dtype=torch.bfloat16, device=device)
    gate, up = x.to(torch.float32).chunk(2, -1)
    product = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
    wanted, wanted_scale = expected(product, packed, dtype)
    got, scale, _ = quantize_lift(x, on(device, packed), dtype, "silu_mul")
    # The two exponentials differ in their last bit, which moves a value over a rounding boundary of bfloat16 once in
    # some 2^14 times: at most a few values differ, and by one step.
    different = as_bits(got) != as_bits(wanted)
    assert int(different.sum()) <= 8
    torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0)
    torch.testing.assert_close(got.to(torch.float32), wanted.to(torch.float32), rtol=2**-3, atol=1)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_lifted_is_refused(device: str) -> None:
    packed = packed_weight("6:8", 64)
    columns = on(device, packed)
    x = torch.randn(4, 64, device=device)
    elsewhere = x.to("cpu" if device == "cuda" else "meta")
    norm, add = {"prologue": "rms_norm", "eps": 1e-6}, {"prologue": "add_rms_norm", "eps": 1e-6, "norm_weight": x[0]}
    for given in (
        *({"x": x[:, :32]}, {"x": torch.randn(64, 4, device=device).T}, {"prologue": "silu_mul"}),
        *({"target": torch.bfloat16}, {"slabs": SLABS}),
        *(norm, norm | {"norm_weight": x[0, :32]}, norm | {"norm_weight": elsewhere[0]}),
        *(add, add | {"residual": x[:2]}, add | {"residual": elsewhere}),
    ):
        with pytest.raises(InputError):
            quantize_lift(**{"x": x, "order": columns, "target": torch.int8} | given)


def test_what_a_launch_by_address_is_told_of_what_it_reads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, bf16 = on(device, packed_weight("6:8", 64)), torch.bfloat16
    where = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    lift = kernels.KernelLift(LiftSpec("add_rms_norm", bf16, torch.int8, tuple(columns.numbers), Layout()), 5, where)
    both, norm_weight = torch.ones(5, 128, dtype=bf16, device=device), torch.ones(64, dtype=bf16, device=device)
    x, residual = both.chunk(2, 1)
    current = True
    monkeypatch.setattr(kernels, "is_current", lambda _: current)
    monkeypatch.setattr(lift.launcher, "_run", None)
    assert lift.inputs(x, residual, norm_weight) is None  # nothing is compiled yet
    assert lift.why_not(x, residual, norm_weight) is None
    monkeypatch.setattr(lift.launcher, "_run", "a kernel")
    told = LiftInputs(x.data_ptr(), residual.data_ptr(), norm_weight.data_ptr(), 128, 128)
    assert lift.inputs(x, residual, norm_weight) == told
    assert lift.why_not(x, residual, norm_weight) is None
    for reason, x_, gain_, residual_ in (
        ("activations to lift", x[:4], norm_weight, residual),
        ("activations to lift", x.half(), norm_weight, residual),
        ("multiples of 16 bytes", both[:, 1:65], norm_weight, residual),
        ("weight of RMSNorm", x, norm_weight[1:], residual),
        ("weight of RMSNorm", x, None, residual),
        ("residual", x, norm_weight, residual.to("meta")),
        ("residual", x, norm_weight, None),
    ):
        assert lift.inputs(x_, residual_, gain_) is None
        assert reason in str(lift.why_not(x_, residual_, gain_))
    current = False
    assert lift.inputs(x, residual, norm_weight) is None
    assert "not the current device" in str(lift.why_not(x, residual, norm_weight))
