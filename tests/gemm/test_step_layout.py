"""Weights in steps: their sizes, and back to the weight. No GPU needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hopper_forms import Bundles, SixBitBundles

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.ampere.backend import Ampere
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.select import BACKENDS
from slidesparse.gemm.steps import COUNTS, StepForm, bundle_of
from slidesparse.layer.weight_form import WeightForm
from slidesparse.lifting.layout import BUNDLE, ColumnOrder
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import Pattern
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


FORMS = [
    *((Hopper, pattern, dtype) for pattern in (*PATTERNS, "6:8", "16:18") for dtype in DTYPES),
    *((Bundles, pattern, dtype) for pattern in BUNDLED for dtype in DTYPES[:2]),
    *((HopperSixBits, pattern, torch.int8) for pattern in (*PATTERNS, "dense")),
    *((Ampere, "dense", dtype) for dtype in DTYPES),
    *((SixBitBundles, pattern, torch.int8) for pattern in BUNDLED),
]


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
