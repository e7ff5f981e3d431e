from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import sparse_int8

from slidesparse import InputError, PackedWeight, Pattern, PatternViolation, SlideLinear, lift, pack, prune_mask
from slidesparse.weights.slide import gather
from slidesparse.weights.support import INT_VIEW


def _pruned_int8(out: int, columns: int, pattern: str) -> torch.Tensor:
    weight = torch.randint(1, 128, (out, columns), dtype=torch.int8)
    return weight * prune_mask(weight, pattern)


def _check(packed: PackedWeight, weight: torch.Tensor) -> None:
    assert torch.equal(packed.unpack(), weight)
    x = torch.randint(-128, 128, (3, weight.shape[1]), dtype=torch.int8)
    exact = x.long() @ weight.long().T
    assert torch.equal(packed.lift(x).long() @ packed.columns().long().T, exact)
    assert torch.equal(packed.lift(x), gather(x, packed.column_map()))
    if packed.slid:
        assert bool(((packed.columns().unflatten(-1, (-1, 4)) != 0).sum(-1) <= 2).all())


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
@pytest.mark.parametrize("text", ["2:4", "4:6", "6:8", "30:32"])
@pytest.mark.parametrize("columns", [77, 1])
def test_unpack_is_the_inverse_for_every_type(dtype: torch.dtype, text: str, columns: int) -> None:
    weight = torch.randn(5, columns).mul(50).to(dtype)
    bits = weight.view(INT_VIEW[dtype]) * prune_mask(weight, text)
    weight = bits.view(dtype)
    before = bits.clone()
    packed = pack(weight, text)
    assert packed.dtype == dtype
    assert torch.equal(packed.unpack().view(INT_VIEW[dtype]), before)
    assert torch.equal(bits, before)  # the input is left as it was


def test_it_is_shown_without_its_tensors_and_equals_itself_alone() -> None:
    packed, other = (pack(sparse_int8(4, 16, 6, 8), "6:8") for _ in range(2))
    assert repr(packed) == "PackedWeight(6:8, shape=[4, 16], dtype=torch.int8, device=cpu)"
    assert packed == packed
    assert packed != other
    assert len({packed, other, packed}) == 2


@given(n=st.integers(2, 16), columns=st.integers(1, 130), out=st.integers(0, 5), data=st.data())
def test_any_shape_any_offset(n: int, columns: int, out: int, data: st.DataObject) -> None:
    pattern = Pattern(2 * n - 2, 2 * n)
    start = data.draw(st.integers(0, 2 * n - 1))
    shard = sparse_int8(out, start + columns, pattern.keep, pattern.group)[:, start:]
    packed = pack(shard, pattern, k_offset=start)
    _check(packed, shard)
    x = torch.randint(-128, 128, (2, columns), dtype=torch.int8)
    assert torch.equal(packed.lift(x), lift(x, pattern, start))
    assert packed.values.shape == (out, -(-(start + columns) // (2 * n)) * pattern.keep)


def test_strided_weights() -> None:
    weight = sparse_int8(12, 40, 6, 8)
    strided = torch.stack([weight, weight])[1].T.contiguous().T
    assert not strided.is_contiguous()
    _check(pack(strided, "6:8"), weight)


def test_column_map_marks_padding() -> None:
    packed = pack(sparse_int8(2, 8, 6, 8)[:, 3:], "6:8", k_offset=3)
    assert packed.column_map().tolist() == [-1, -1, -1, 0, -1, 0, 1, 2, 1, 2, 3, 4]
    assert packed.column_map(16).tolist() == [-1, -1, -1, 0, -1, 0, 1, 2, 1, 2, 3, 4, -1, -1, -1, -1]


def test_other_activations_and_multiples_are_refused() -> None:
    packed = pack(torch.zeros(2, 16), "6:8")
    for x in (torch.zeros(3, 15), torch.zeros(3, 17), torch.zeros(3, 16, dtype=torch.int64)):
        with pytest.raises(InputError, match="activations"):
            packed.lift(x)
    for multiple in (0, -1, 2**31 + 1):
        with pytest.raises(InputError, match="multiple of packed columns"):
            packed.column_map(multiple)


@pytest.mark.parametrize("k_offset", [0, 3])
def test_a_dense_weight_is_packed_as_it_is(k_offset: int) -> None:
    weight = torch.randint(1, 128, (3, 10), dtype=torch.int8)
    packed = pack(weight, "dense", k_offset=k_offset)
    assert not packed.slid
    assert packed.metadata() is None
    assert packed.values.shape == (3, 12 if k_offset == 0 else 16)
    packed.unpack().zero_()
    packed.columns().zero_()  # copies
    assert packed.column_map(8).tolist() == [-1] * k_offset + [*range(10)] + [-1] * (6 - k_offset)
    _check(packed, weight)


def test_a_violation_is_never_dropped() -> None:
    weight = torch.zeros(3, 16)
    weight[2, 8:15] = 1.0
    with pytest.raises(PatternViolation, match="up_proj violates 6:8 at row 2, group 1"):
        pack(weight, "6:8", name="up_proj")


def test_scale_is_one_number_a_channel() -> None:
    weight = torch.zeros(3, 8, dtype=torch.int8)
    packed = pack(weight, "6:8", scale=torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float16))
    assert packed.scale.dtype == torch.float32
    assert packed.scale.tolist() == [1, 2, 3]
    for wrong in ({"scale": torch.ones(4)}, {"k_offset": -1}, {"k_offset": 8}):
        with pytest.raises(InputError):
            pack(weight, "6:8", **wrong)


def test_a_scale_that_was_computed_with_gradients_leaves_them() -> None:
    # A packed weight is data: with a graph on it a layer could not be copied, and its outputs would require gradients.
    scale = torch.ones(3, requires_grad=True) * 2
    packed = pack(torch.zeros(3, 8, dtype=torch.int8), "6:8", scale=scale)
    assert not packed.scale.requires_grad
    assert copy.deepcopy(packed).scale.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "dtype", "bytes_per_weight"),
    [("6:8", torch.int8, 0.9375), ("2:4", torch.int8, 0.625), ("6:8", torch.bfloat16, 1.6875)],
)
def test_bytes_follow_the_theory(text: str, dtype: torch.dtype, bytes_per_weight: float) -> None:
    packed = pack(torch.zeros(8, 64, dtype=dtype), text)
    assert packed.n_bytes == bytes_per_weight * 8 * 64
    assert packed.n_bytes == Pattern.parse(text).bytes_per_weight("2:4", 8 * dtype.itemsize) * 8 * 64


def test_moving_keeps_everything() -> None:
    weight = _pruned_int8(4, 30, "4:6")
    packed = pack(weight, "4:6", scale=torch.ones(4))
    moved = packed.to("cpu")
    assert torch.equal(moved.unpack(), weight)
    assert moved.device == torch.device("cpu")


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("device", ["xpu", "cuda:99", "nowhere", 99, None])
def test_moving_to_a_device_that_is_not_here_is_one_line(device: Any, scaled: bool) -> None:
    packed = pack(_pruned_int8(4, 30, "4:6"), "4:6", scale=torch.ones(4) if scaled else None)
    with pytest.raises(InputError, match=r"^device"):
        packed.to(device)


def test_a_default_device_changes_nothing() -> None:
    """Scripts set one. "meta" stands for a GPU: whatever were made there could not meet what is on the CPU."""
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    expected = pack(weight * prune_mask(weight, "4:6"), "4:6")
    with torch.device("meta"):
        pruned = weight * prune_mask(weight, "4:6")
        packed = pack(pruned, "4:6")
        read = SlideLinear(packed, backend="reference").state_dict()["weight"]
    assert torch.equal(packed.unpack(), expected.unpack())
    assert read.device.type == "cpu"
