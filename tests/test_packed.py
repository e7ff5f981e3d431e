from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import sparse_int8

from slidesparse import InputError, PackedWeight, Pattern, PatternViolation, SlideLinear, lift, pack, prune_mask
from slidesparse.weights.slide import gather
from slidesparse.weights.support import INT_VIEW, following_groups

PARTIAL = ["2:4@33.33%", "14:16@90%", "4:6@0.01%", "4:6@99.99%"]


def _partial_int8(out: int, columns: int, pattern: str) -> torch.Tensor:
    weight = torch.randint(1, 128, (out, columns), dtype=torch.int8)
    return weight * prune_mask(weight, pattern)


def _check(packed: PackedWeight, weight: torch.Tensor) -> None:
    assert torch.equal(packed.unpack(), weight)
    x = torch.randint(-128, 128, (3, weight.shape[1]), dtype=torch.int8)
    exact = x.long() @ weight.long().T
    assert torch.equal(packed.lift(x).long() @ packed.columns().long().T, exact)
    assert torch.equal(packed.lift(x), gather(x, packed.column_map()))
    for segment in packed.segments:
        if segment.kind == "2:4":
            slid = packed.columns()[:, -len(segment.groups) * packed.pattern.slid_group :]
            assert bool(((slid.unflatten(-1, (-1, 4)) != 0).sum(-1) <= 2).all())


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
@pytest.mark.parametrize("text", ["2:4", "6:8", "30:32", "4:6@50%"])
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


@given(n=st.integers(2, 16), columns=st.integers(1, 130), out=st.integers(0, 5), data=st.data())
def test_any_shape_any_offset(n: int, columns: int, out: int, data: st.DataObject) -> None:
    pattern = Pattern(2 * n - 2, 2 * n)
    start = data.draw(st.integers(0, 2 * n - 1))
    shard = sparse_int8(out, start + columns, pattern.keep, pattern.group)[:, start:]
    packed = pack(shard, pattern, k_offset=start)
    _check(packed, shard)
    x = torch.randint(-128, 128, (2, columns), dtype=torch.int8)
    assert torch.equal(packed.lift(x), lift(x, pattern, start))
    assert packed.segments[0].values.shape == (out, -(-(start + columns) // (2 * n)) * pattern.keep)


def test_strided_weights() -> None:
    weight = sparse_int8(12, 40, 6, 8)
    strided = torch.stack([weight, weight])[1].T.contiguous().T
    assert not strided.is_contiguous()
    _check(pack(strided, "6:8"), weight)


@pytest.mark.parametrize("text", PARTIAL)
@pytest.mark.parametrize("columns", [96, 100, 47])
def test_partial_patterns(text: str, columns: int) -> None:
    pattern = Pattern.parse(text)
    weight = _partial_int8(6, columns, text)
    packed = pack(weight, text)
    total = pattern.groups(columns)
    slid = {s.kind: s.groups for s in packed.segments}
    assert len(slid["2:4"]) >= pattern.share * total
    assert sorted(torch.cat(list(slid.values())).tolist()) == list(range(total))
    _check(packed, weight)


def test_dense_comes_before_slid() -> None:
    weight = torch.ones(2, 24, dtype=torch.int8)
    weight[:, [0, 1, 12, 17]] = 0  # groups 0 and 2 follow 4:6
    packed = pack(weight, "4:6@50%")
    assert [(s.kind, s.groups.tolist()) for s in packed.segments] == [("dense", [1, 3]), ("2:4", [0, 2])]
    dense = [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]
    slid = [0, 1, 2, 3, 2, 3, 4, 5, 12, 13, 14, 15, 14, 15, 16, 17]
    assert packed.column_map().tolist() == dense + slid
    # A backend may ask each segment to end at a multiple: 12 -> 16 and 16 -> 16.
    assert packed.column_map(8).tolist() == [*dense, -1, -1, -1, -1, *slid]


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_groups_are_numbers_of_any_integer_type(dtype: torch.dtype) -> None:
    packed = pack(torch.zeros(2, 32), "6:8", groups=torch.tensor([1, 3], dtype=dtype))
    dense, slid = packed.segments
    assert (dense.groups.tolist(), slid.groups.tolist()) == ([0, 2], [1, 3])
    assert slid.groups.dtype == torch.int64


def test_dense_pattern_is_one_dense_segment() -> None:
    weight = torch.randint(1, 128, (3, 10), dtype=torch.int8)
    packed = pack(weight, "dense")
    assert [s.kind for s in packed.segments] == ["dense"]
    assert packed.metadata() is None
    _check(packed, weight)


@pytest.mark.parametrize("text", PARTIAL)
@pytest.mark.parametrize("start", [0, 1, 13, 50])
def test_shards_of_partial_patterns(text: str, start: int) -> None:
    pattern = Pattern.parse(text)
    shard = _partial_int8(4, 100, text)[:, start : start + 37]
    k_offset = start % pattern.group
    groups = following_groups(shard, pattern, k_offset)
    _check(pack(shard, pattern, k_offset=k_offset, groups=groups), shard)


def test_a_shard_of_a_partial_pattern_must_say_its_groups() -> None:
    with pytest.raises(InputError, match="following_groups"):
        pack(torch.zeros(1, 12), "4:6@50%", k_offset=2)


def test_some_groups_of_a_uniform_pattern() -> None:
    # A weight of which only some groups follow can be slid there and kept dense elsewhere.
    weight = sparse_int8(3, 32, 6, 8)
    weight[0, 8:16] = 1
    packed = pack(weight, "6:8", groups=following_groups(weight, Pattern(6, 8)))
    assert [(s.kind, s.groups.tolist()) for s in packed.segments] == [("dense", [1]), ("2:4", [0, 2, 3])]
    _check(packed, weight)


@pytest.mark.parametrize("groups", [[-1], [0, 0], [1, 0], [4]])
def test_groups_must_be_ascending_groups_of_the_weight(groups: list[int]) -> None:
    with pytest.raises(InputError, match="groups"):
        pack(torch.zeros(2, 32), "6:8", groups=torch.tensor(groups))


def test_a_violation_is_never_dropped() -> None:
    weight = torch.zeros(3, 16)
    weight[2, 8:15] = 1.0
    with pytest.raises(PatternViolation, match="up_proj violates 6:8 at row 2, group 1"):
        pack(weight, "6:8", name="up_proj")


@pytest.mark.parametrize("k_offset", [-1, 8])
def test_bad_offset(k_offset: int) -> None:
    with pytest.raises(InputError, match="k_offset of 6:8"):
        pack(torch.zeros(2, 8), "6:8", k_offset=k_offset)


def test_scale_is_one_number_a_channel() -> None:
    weight = torch.zeros(3, 8, dtype=torch.int8)
    packed = pack(weight, "6:8", scale=torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float16))
    assert packed.scale.dtype == torch.float32
    assert packed.scale.tolist() == [1, 2, 3]
    with pytest.raises(InputError, match=r"scale of k_proj; got \[4\]"):
        pack(weight, "6:8", scale=torch.ones(4), name="k_proj")


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


def test_bytes_of_a_partial_weight() -> None:
    weight = _partial_int8(6, 96, "4:6@50%")
    assert pack(weight, "4:6@50%").n_bytes == Pattern.parse("4:6@50%").bytes_per_weight("2:4") * weight.numel()


def test_moving_keeps_everything() -> None:
    weight = _partial_int8(4, 30, "4:6@50%")
    packed = pack(weight, "4:6@50%", scale=torch.ones(4))
    moved = packed.to("cpu")
    assert torch.equal(moved.unpack(), weight)
    assert moved.device == torch.device("cpu")
    # Storage order is segments, not columns: unpacking uses their group lists alone.
    assert torch.equal(replace(packed, segments=packed.segments[::-1]).unpack(), weight)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("device", ["xpu", "cuda:99", "nowhere", 99, None])
def test_moving_to_a_device_that_is_not_here_is_one_line(device: Any, scaled: bool) -> None:
    packed = pack(_partial_int8(4, 30, "4:6@50%"), "4:6@50%", scale=torch.ones(4) if scaled else None)
    with pytest.raises(InputError, match=r"^device"):
        packed.to(device)


def test_a_default_device_changes_nothing() -> None:
    """Scripts set one. "meta" stands for a GPU: whatever were made there could not meet what is on the CPU."""
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    expected = pack(weight * prune_mask(weight, "4:6@50%"), "4:6@50%")
    with torch.device("meta"):
        pruned = weight * prune_mask(weight, "4:6@50%")
        packed = pack(pruned, "4:6@50%")
        read = SlideLinear(packed, backend="reference").state_dict()["weight"]
    assert torch.equal(packed.unpack(), expected.unpack())
    assert read.device.type == "cpu"
