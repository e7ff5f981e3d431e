"""The Hopper kernel's operands, decoded by an emulator of the hardware's view: no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import hopper_emulator as emulator
import numpy as np
import pytest
import torch
from hopper_forms import Bundles, SixBitBundles
from slab_views import slab_view

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.weights import COUNTS, SLABS, StepForm, bundle_of, count_bits_of
from slidesparse.gemm.select import BACKENDS
from slidesparse.layer.weight_form import WeightForm
from slidesparse.lifting.layout import BUNDLE, ColumnOrder
from slidesparse.ops import quantize_lift
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import decode_group, metadata
from slidesparse.weights.support import as_bits

BUNDLED = ("4:6", "6:8", "8:10", "14:16")
PATTERNS = ("2:4", "4:6", "14:16")
DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def _packed(
    pattern: str, dtype: torch.dtype, out: int, columns: int, k_offset: int = 0, six_bits: bool = False
) -> PackedWeight:
    weight = torch.randn(out, k_offset + columns) * 30
    weight = (weight * prune_mask(weight, pattern)).to(dtype)[:, k_offset:].contiguous()
    weight = weight & -4 if six_bits else weight
    scale = torch.rand(out) if dtype.itemsize == 1 else None
    return pack_by(weight, pattern, scale=scale, k_offset=k_offset)


def _decoded(packed: PackedWeight, backend: type[Hopper] = Hopper) -> np.ndarray:
    (steps,) = backend().prepare(packed)
    return emulator.weights(steps.numpy(), packed.dtype.itemsize)


def _bits(matrix: torch.Tensor) -> np.ndarray:
    return as_bits(matrix).numpy().view(emulator.TYPES[matrix.element_size()])


FORMS = [
    *((Hopper, pattern, dtype) for pattern in (*PATTERNS, "6:8", "16:18") for dtype in DTYPES),
    *((Bundles, pattern, dtype) for pattern in BUNDLED for dtype in DTYPES[:2]),
    *((HopperSixBits, pattern, torch.int8) for pattern in (*PATTERNS, "dense")),
    *((SixBitBundles, pattern, torch.int8) for pattern in BUNDLED),
]


@pytest.mark.parametrize(("backend", "pattern", "dtype"), FORMS)
def test_the_hardware_reads_the_weight_by_the_column_map(
    backend: type[Hopper], pattern: str, dtype: torch.dtype
) -> None:
    packed = _packed(pattern, dtype, 70, 333, six_bits=backend.value_bits == 6)
    decoded, column_map = _decoded(packed, backend), backend.layout.column_map(packed).numpy()
    assert decoded.shape == (256, len(column_map))
    assert not decoded[70:].any()
    assert not decoded[:, column_map < 0].any()
    # The lifted columns of an input column share its weights among them: together they are the weight, each once.
    weight, total = _bits(packed.unpack()), np.zeros((70, 333), np.int64)
    for column, source in enumerate(column_map):
        if source >= 0:
            total[:, source] += decoded[:70, column]
    assert np.array_equal(total, weight)


def test_six_bits_take_four_fifths_of_the_memory() -> None:
    packed = _packed("6:8", torch.int8, 512, 1024, six_bits=True)
    eight, six = (backend().prepare(packed)[0] for backend in (Hopper, HopperSixBits))
    assert six.nbytes * 5 == eight.nbytes * 4
    order = HopperSixBits.layout.order(packed)
    assert order is not None
    form = StepForm.of_order(order, 1, 6)
    assert (form.slabs, form.windows, form.value_bits) == (12, 0, 6)
    assert form == HopperSixBits().form_of(six)
    assert form.shape(512, 1) == six.shape


def test_dense_six_bits_take_three_quarters_of_the_memory() -> None:
    packed = _packed("dense", torch.int8, 512, 1024, six_bits=True)
    (steps,), order = HopperSixBits().prepare(packed), HopperSixBits.layout.order(packed)
    assert steps.nbytes * 4 == packed.values.nbytes * 3
    assert order is not None
    form = StepForm.of_order(order, 1, 6)
    assert form == HopperSixBits().form_of(steps) == (8, 0, 6, True)
    assert form.shape(512, 1) == steps.shape


@pytest.mark.parametrize("pattern", ["6:8", "dense"])
def test_values_of_more_bits_are_refused(pattern: str) -> None:
    packed = _packed(pattern, torch.int8, 64, 128)
    with pytest.raises(InputError, match=r"values of a weight for hopper-6bit; got 8 bits.*use backend='auto'"):
        HopperSixBits().prepare(packed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_dense_weight_of_more_bits_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError):
        Hopper().prepare(_packed("dense", dtype, 70, 333))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_shapes_of_the_steps_follow_from_the_column_order(pattern: str, dtype: torch.dtype) -> None:
    backends = (Hopper, Bundles) if dtype.itemsize == 1 and pattern in BUNDLED else (Hopper,)
    for (out, columns, k_offset), backend in product(
        ((70, 333, 0), (256, 1024, 0), (257, 16, 0), (70, 400, 3)), backends
    ):
        packed = _packed(pattern, dtype, out, columns, k_offset % Pattern.parse(pattern).group)
        order = backend.layout.order(packed)
        assert order is not None
        (steps,) = backend().prepare(packed)
        assert StepForm.of_order(order, dtype.itemsize).shape(out, dtype.itemsize) == steps.shape
        assert len(backend.layout.column_map(packed)) == order.k_packed


@pytest.mark.parametrize(("pattern", "columns"), [*((pattern, 500) for pattern in PATTERNS), ("6:8", 3072)])
def test_int8_product_of_what_the_hardware_reads(pattern: str, columns: int) -> None:
    packed = _packed(pattern, torch.int8, 130, columns)
    assert (bundle_of(packed) == BUNDLE) == (pattern != "2:4")
    x = torch.randn(200, columns)
    layout = Hopper.layout
    lifted, _ = quantize_lift(x, layout.column_map(packed), torch.int8, "hopper")
    slabs = slab_view(lifted, SLABS).contiguous().view(torch.uint8).numpy()
    ours = emulator.activations(slabs, 1).view(np.int8)[:200].astype(np.int64)
    result = ours @ _decoded(packed).view(np.int8)[:130].astype(np.int64).T
    exact = quantize_rows(x, torch.int8).values.numpy().astype(np.int64) @ packed.unpack().numpy().astype(np.int64).T
    assert np.array_equal(result, exact)


@pytest.mark.parametrize("k_offset", [2, 5])
@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_a_shard_that_starts_inside_a_group(pattern: str, k_offset: int) -> None:
    whole = _packed(pattern, torch.int8, 40, 480).unpack()
    shard = whole[:, 240 + k_offset :].contiguous()
    size = 8 if pattern == "6:8" else 6
    packed = pack_by(shard, pattern, scale=torch.ones(40), k_offset=(240 + k_offset) % size)
    x = torch.randint(-128, 128, (3, shard.shape[1]))
    for backend in (Hopper, Bundles):
        decoded, column_map = _decoded(packed, backend).view(np.int8), backend.layout.column_map(packed)
        lifted = torch.where(column_map < 0, 0, x[:, column_map.clamp(min=0)]).numpy()
        assert np.array_equal(lifted @ decoded[:40].astype(np.int64).T, (x @ shard.long().T).numpy())


def test_the_emulator_notices_a_wrong_index() -> None:
    packed = _packed("6:8", torch.int8, 64, 128)
    steps = Hopper().prepare(packed)[0].numpy()
    before = emulator.weights(steps, 1)
    nibble = steps[0, 0, 0, 4096] & 15  # window 0 of row 0
    steps[0, 0, 0, 4096] ^= nibble ^ min(emulator.LEGAL - {int(nibble)})
    assert not np.array_equal(before, emulator.weights(steps, 1))


# -- the inverse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "columns", "k_offset"), [(1, 1, 0), (70, 333, 3), (257, 256, 0)])
@pytest.mark.parametrize(("backend", "pattern", "dtype"), FORMS)
def test_a_weight_comes_back_from_every_form(
    backend: type[Hopper], pattern: str, dtype: torch.dtype, out: int, columns: int, k_offset: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    packed = _packed(pattern, dtype, out, columns, k_offset, backend.value_bits == 6)
    weight = WeightForm(packed, backend.name).unpack(packed.shape, dtype)
    assert (weight.dtype, weight.shape) == (dtype, (out, columns))
    assert torch.equal(as_bits(weight), as_bits(packed.unpack()))


def _only_first_left_out(pattern: str, dtype: torch.dtype, six_bits: bool) -> PackedWeight:
    """A weight of one row tile, every bit of whose operand counts: nothing is padded, and no kept value is 0.

    Every group leaves out its first two positions, before which no entry is kept: a larger count moves entries.
    """
    group = Pattern.parse(pattern).group
    weight = (torch.randint(1, 32, (256, BUNDLE * group)) * 4).to(dtype)
    weight.view(256, BUNDLE, group)[:, :, :2] = 0
    packed = pack_by(weight, pattern, scale=torch.ones(256) if dtype.itemsize == 1 else None)
    return packed if six_bits or dtype != torch.int8 else replace(packed, values=packed.values | 1)


@pytest.mark.parametrize(("backend", "pattern", "dtype"), FORMS)
def test_a_damaged_operand_does_not_come_back(backend: type[Hopper], pattern: str, dtype: torch.dtype) -> None:
    packed = _only_first_left_out(pattern, dtype, backend.value_bits == 6)
    (steps,) = backend().prepare(packed)
    shape = 256, len(backend.layout.column_map(packed))
    matrix = as_bits(backend().columns((steps,), shape, dtype)).clone()
    for byte in torch.randperm(steps.numel())[:8].tolist():
        for bit in (0, 3, 7):
            steps.view(-1)[byte] ^= 1 << bit
            assert not torch.equal(as_bits(backend().columns((steps,), shape, dtype)), matrix), (byte, bit)
            steps.view(-1)[byte] ^= 1 << bit
    assert torch.equal(as_bits(backend().columns((steps,), shape, dtype)), matrix)


# -- bundles ---------------------------------------------------------------------------------------------------------


def _as_the_kernel(planes: list[np.ndarray], window: int) -> tuple[np.ndarray, np.ndarray]:
    """``metadata_of`` of the kernel's source, word for word: two metadata registers from a thread's words."""
    low, pairs = np.uint32(0x55555555), np.uint32(0x33333333)
    first, second = ~planes[0], ~np.zeros_like(planes[0])
    for bit, plane in enumerate(planes[1:]):
        limit = np.uint32(0xFFFFFFFF * (window >> bit & 1))
        first = (~plane & limit) | (~(plane ^ limit) & first)
        second = (~plane & limit) | (~(plane ^ limit) & second)
    even, odd = (at_most ^ ((at_most >> np.uint32(1)) & low) for at_most in (first, second))
    odd = odd + low
    two = np.uint32(2)
    return (even & pairs) | ((odd << two) & ~pairs), ((even >> two) & pairs) | (odd & ~pairs)


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "10:12", "14:16"])
def test_a_few_instructions_give_the_metadata_of_every_group(pattern: str) -> None:
    parsed = Pattern.parse(pattern)
    code = torch.arange(parsed.codes, dtype=torch.uint8)
    wanted = metadata(code.unsqueeze(1), parsed).numpy().astype(np.uint32)  # [codes, windows]
    a, b = (position.numpy().astype(np.uint32) for position in decode_group(code, parsed))
    counts = (a, b - 1)  # kept entries before each
    # Every code in every nibble of both registers, its neighbours being others.
    for shift in range(16):
        groups = (np.arange(parsed.codes)[:, None] + shift + 7 * np.arange(16)) % parsed.codes
        planes = []
        for bit in range(count_bits_of(parsed.windows)):
            word = np.zeros(parsed.codes, np.uint32)
            for nibble in range(8):
                for register in range(2):
                    for which in range(2):
                        one = counts[which][groups[:, 8 * register + nibble]] >> bit & 1
                        word |= one << np.uint32(4 * nibble + 2 * register + which)
            planes.append(word)
        for window in range(parsed.windows):
            for register, found in enumerate(_as_the_kernel(planes, window)):
                for nibble in range(8):
                    got = found >> np.uint32(4 * nibble) & 15
                    assert np.array_equal(got, wanted[groups[:, 8 * register + nibble], window])


def test_a_slab_has_a_window_of_32_groups() -> None:
    packed = _packed("6:8", torch.int8, 8, 8 * 40)
    columns = Bundles.layout.column_map(packed).view(-1, 32, 4)  # slabs, places, columns of a window
    assert len(columns) == 2 * 3
    for slab, first in ((0, 0), (1, 2), (2, 4)):
        groups = (columns[slab, :, 0] - first) // 8
        assert groups[:8].tolist() == [0, 8, 16, 24, 1, 9, 17, 25]
        assert sorted(groups.tolist()) == list(range(32))
        assert (columns[slab] == (8 * groups + first)[:, None] + torch.arange(4)).all()
    assert (columns[3] >= 0).all(1).sum() == 8
    order = Bundles.layout.order(packed)
    assert (order.bundle, order.k_packed) == (32, 6 * 128)
    assert order.numbers[-1] == 32
    assert ColumnOrder(*order.numbers) == order


@pytest.mark.parametrize(
    ("pattern", "columns", "bundle"),
    [
        ("6:8", 3584, 32),
        ("4:6", 2048, 32),  # both take 22 slabs
        ("8:10", 3584, 1),  # 48 slabs for 45
        ("8:10", 18944, 32),
        ("2:4", 3584, 1),
        ("16:18", 3584, 1),
    ],
)
def test_bundles_are_used_where_they_hardly_pad(pattern: str, columns: int, bundle: int) -> None:
    packed = _packed(pattern, torch.int8, 2, columns)
    assert bundle_of(packed) == bundle
    if bundle > 1:
        tight, plain = (len(layout.column_map(packed)) for layout in (COUNTS, Hopper.layout))
        assert plain <= tight <= 1.02 * plain
    assert bundle_of(_packed(pattern, torch.bfloat16, 2, columns)) == 1


def test_padding_has_legal_metadata() -> None:
    packed = _packed("6:8", torch.int8, 3, 8)
    steps = Bundles().prepare(packed)[0].numpy()
    for block in range(4):
        planes = emulator.of_threads(emulator.of_block(steps[0, 0], block)[0])
        for row in range(3 if block == 0 else 0, 64):
            counts = {emulator.count(planes, row, place, which) for place in range(32) for which in range(2)}
            assert counts == {6}


def test_the_emulator_notices_a_wrong_count() -> None:
    packed = _packed("6:8", torch.int8, 64, 256)
    steps = Bundles().prepare(packed)[0].numpy()
    before = emulator.weights(steps, 1)
    planes = emulator.of_threads(steps[0, 0, : 3 * 512])
    counts = [emulator.count(planes, 0, 0, which) for which in range(2)]
    for plane in range(3):  # the first group of row 0 leaves out its last two instead
        steps[0, 0, 512 * plane] = steps[0, 0, 512 * plane] & 0xFC | (6 >> plane & 1) * 3
    assert counts != [6, 6]
    assert not np.array_equal(before, emulator.weights(steps, 1))
