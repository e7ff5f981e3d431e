from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import random_int8, sparse_int8
from torch.utils._python_dispatch import TorchDispatchMode

from slidesparse import InputError, Pattern, PatternViolation, tightest_pattern
from slidesparse.weights.support import (
    INT_VIEW,
    check_pattern,
    check_weight,
    group_counts,
    is_finite,
    is_nonzero,
    satisfies,
)

FLOATS = [dtype for dtype in INT_VIEW if dtype.is_floating_point]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_is_a_matter_of_bits(dtype: torch.dtype) -> None:
    smallest = torch.ones(1, dtype=INT_VIEW[dtype]).view(dtype)  # the smallest subnormal
    values = torch.cat(
        [torch.tensor([0.0, -0.0, 1.0, -1.0]).to(dtype).view(INT_VIEW[dtype]), smallest.view(INT_VIEW[dtype])]
    )
    assert is_nonzero(values.view(dtype)).tolist() == [False, False, True, True, True]


def test_int8_minimum_is_not_zero() -> None:
    # All bits but the sign are zero, as in -0.0.
    assert is_nonzero(torch.tensor([-128, 0, 1], dtype=torch.int8)).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_weights_are_refused(dtype: torch.dtype, bad: float) -> None:
    if (dtype == torch.float8_e4m3fn and bad != bad) or dtype != torch.float8_e4m3fn:
        weight = torch.tensor([[1.0, bad, bad, 0.0]]).to(dtype)
        with pytest.raises(InputError, match="proj holds NaN or Inf; got 2 "):
            check_weight(weight, "proj")


def test_every_value_of_fp8_but_nan_is_finite() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    for value in bits.split(1):
        assert is_finite(value.view(torch.float8_e4m3fn)) == (int(value) not in (0x7F, 0xFF))
    assert not is_finite(bits.view(torch.float8_e4m3fn))
    assert is_finite(bits[(bits != 0x7F) & (bits != 0xFF)].view(torch.float8_e4m3fn))
    assert not is_finite(torch.tensor([1.0, float("inf")]).to(torch.float8_e5m2))


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
def test_no_temporary_is_much_larger_than_the_weight(dtype: torch.dtype) -> None:
    """Where a server loads a model, memory is full of other weights."""
    largest: list[int] = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            made = [one for one in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(one)]
            largest.extend(one.untyped_storage().nbytes() for one in made)
            return result

    weight = torch.randint(-5, 5, (64, 64)).to(dtype)
    with Watch():
        tightest_pattern(weight)
    assert max(largest) < 2 * weight.nbytes  # groups are completed


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4), "proj has the wrong rank"),
        (torch.zeros(2, 4, 4), "proj has the wrong rank"),
        (torch.zeros(4, 8, dtype=torch.float64), "proj has an unsupported type; got torch.float64"),
        (torch.zeros(4, 8, dtype=torch.int32), "proj has an unsupported type"),
        (torch.zeros(4, 0), "proj has no input columns"),
    ],
)
def test_malformed_weights_are_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_weight(weight, "proj")


def test_violation_names_tensor_row_group_and_count() -> None:
    weight = sparse_int8(5, 32, 6, 8)
    weight[3, 16:24] = 1
    weight[4, 8:16] = torch.tensor([1] * 7 + [0], dtype=torch.int8)  # one too many
    with pytest.raises(PatternViolation) as error:
        check_pattern(weight, "6:8", name="layers.7.mlp.down_proj")
    e = error.value
    assert (e.tensor, e.row, e.group, e.count, e.violations) == ("layers.7.mlp.down_proj", 3, 2, 8, 2)
    for part in ("layers.7.mlp.down_proj", "6:8", "row 3", "group 2", "8 non-zeros", "at most 6", "2 such groups"):
        assert part in str(e)
    assert "\n" not in str(e)


def test_counts_of_groups() -> None:
    support = np.array([[1, 1, 1, 0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 1, 1, 1, 1]], dtype=bool)
    weight = random_int8(support)
    pattern = Pattern(4, 6)
    assert group_counts(weight, pattern).tolist() == [[5, 3], [3, 4]]
    # Shifted by two columns the groups are [0:4], [4:10].
    assert group_counts(weight, pattern, 2).tolist() == [[3, 5], [2, 5]]
    for columns, k_offset, satisfied in ((10, 0, False), (10, 2, False), (4, 2, True)):
        assert satisfies(weight[:, :columns], pattern, k_offset) == satisfied
    assert satisfies(weight[:0], pattern)


def test_every_weight_satisfies_dense() -> None:
    check_pattern(torch.ones(3, 10), "dense")
    assert tightest_pattern(torch.ones(3, 10), ["6:8", "dense"]) == Pattern.parse("dense")


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_tightest_pattern(n: int) -> None:
    # Every group full to the brim, so that nothing sparser holds.
    assert tightest_pattern(sparse_int8(64, 480, 2 * n - 2, 2 * n)) == Pattern(2 * n - 2, 2 * n)


def test_tightest_pattern_of_extremes() -> None:
    assert tightest_pattern(torch.ones(4, 32)) is None
    assert tightest_pattern(torch.zeros(4, 32)) == Pattern(2, 4)


def test_patterns_do_not_nest() -> None:
    # Two neighbouring 4:6 groups may hold eight non-zeros in a row: that is no 6:8.
    weight = random_int8(np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=bool))
    check_pattern(weight, "4:6")
    assert tightest_pattern(weight, k_offset=0) == Pattern(4, 6)
    shard = weight[:, 2:]
    with pytest.raises(PatternViolation):
        check_pattern(shard, "6:8")
