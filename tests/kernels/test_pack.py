"""The packing kernel against its torch definition, bit for bit."""

from __future__ import annotations

import pytest
import torch

from slidesparse.errors import InputError, PatternViolation
from slidesparse.kernels.pack import BLOCK, compress
from slidesparse.packed import pack
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask
from slidesparse.slide import metadata
from slidesparse.support import as_bits, grouped

TYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def sparse(pattern: str, columns: int, dtype: torch.dtype, k_offset: int = 0, rows: int = 3) -> torch.Tensor:
    """A weight [rows, columns] that satisfies its (uniform) pattern from ``k_offset`` on; its zeros are -0 where it has
    them, and it has more than it must.
    """
    whole = torch.randn(rows, columns + k_offset) * 20
    whole[:, :k_offset] = 0
    kept = prune_mask(whole, pattern) & (whole.abs() > 2)
    return torch.where(kept, whole, -0.0)[:, k_offset:].to(dtype).contiguous()


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10", "14:16", "22:24"])
@pytest.mark.parametrize("k_offset", [0, 3])
def test_every_pattern(device: str, pattern: str, k_offset: int) -> None:
    parsed = Pattern.parse(pattern)
    weight = sparse(pattern, 100, torch.int8, k_offset)
    wanted = pack(weight, pattern, k_offset=k_offset).segments[0]
    got = compress(weight.to(device), parsed, k_offset=k_offset, metadata=True)
    assert torch.equal(got.values.cpu(), wanted.values)
    assert torch.equal(got.code.cpu(), wanted.code)
    assert got.code.dtype == wanted.code.dtype
    assert torch.equal(got.metadata.cpu(), metadata(wanted.code, parsed))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type(device: str, dtype: torch.dtype) -> None:
    weight = sparse("6:8", 50, dtype)
    wanted = pack(weight, "6:8").segments[0]
    got = compress(weight.to(device), Pattern(6, 8))
    assert got.values.dtype == dtype
    assert torch.equal(as_bits(got.values).cpu(), as_bits(wanted.values))
    assert torch.equal(got.code.cpu(), wanted.code)
    assert got.metadata is None


def test_chosen_groups_alone_are_checked_and_packed(device: str) -> None:
    weight = sparse("4:6", 60, torch.int8)
    groups = torch.tensor([1, 4, 8])
    others = [g for g in range(10) if g not in groups.tolist()]
    by_group = grouped(weight, Pattern(4, 6))
    by_group[:, others] = 1
    dense_elsewhere = by_group.flatten(1)
    wanted = pack(dense_elsewhere, "4:6@30%", groups=groups).segments[1]
    got = compress(dense_elsewhere.to(device), Pattern(4, 6), groups.to(device))
    assert torch.equal(got.values.cpu(), wanted.values)
    assert torch.equal(got.code.cpu(), wanted.code)


def test_more_groups_than_one_program_treats(device: str) -> None:
    weight = sparse("2:4", 4 * BLOCK + 6, torch.int8)
    wanted = pack(weight, "2:4").segments[0]
    got = compress(weight.to(device), Pattern(2, 4))
    assert torch.equal(got.values.cpu(), wanted.values)
    assert torch.equal(got.code.cpu(), wanted.code)


def test_rows_may_lie_anywhere(device: str) -> None:
    weight = sparse("6:8", 32, torch.int8, rows=6)
    wide = torch.cat([torch.ones(6, 3, dtype=torch.int8), weight], 1).to(device)
    got = compress(wide[::2, 3:], Pattern(6, 8))
    assert torch.equal(got.values.cpu(), pack(weight[::2], "6:8").segments[0].values)


def test_no_rows(device: str) -> None:
    got = compress(torch.zeros(0, 16, dtype=torch.int8, device=device), Pattern(6, 8))
    assert got.values.shape == (0, 12)
    assert got.code.shape == (0, 2)


def test_a_violation_is_named(device: str) -> None:
    weight = sparse("6:8", 64, torch.int8)
    weight[1, 24:32] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1])
    with pytest.raises(PatternViolation) as error:
        compress(weight.to(device), Pattern(6, 8), name="q_proj")
    assert (error.value.row, error.value.group, error.value.count, error.value.violations) == (1, 3, 7, 1)
    assert error.value.tensor == "q_proj"


NON_FINITE = [(torch.float8_e4m3fn, float("nan"))]  # which has no infinity
NON_FINITE += [(dtype, float(fault)) for dtype in TYPES[2:] for fault in ("nan", "inf", "-inf")]


@pytest.mark.parametrize(("dtype", "fault"), NON_FINITE)
def test_what_is_not_finite_is_refused(device: str, dtype: torch.dtype, fault: float) -> None:
    weight = sparse("6:8", 64, dtype)
    weight[2, 5] = fault
    weight[2, 0:2] = 0
    with pytest.raises(InputError, match="NaN or Inf"):
        compress(weight.to(device), Pattern(6, 8))


def test_what_is_no_weight_is_refused(device: str) -> None:
    with pytest.raises(InputError, match="rank"):
        compress(torch.zeros(4, dtype=torch.int8, device=device), Pattern(6, 8))
    with pytest.raises(InputError, match="type"):
        compress(torch.zeros(4, 8, dtype=torch.int32, device=device), Pattern(6, 8))
    with pytest.raises(InputError, match="contiguous"):
        compress(torch.zeros(8, 4, dtype=torch.int8, device=device).T, Pattern(2, 4))
    with pytest.raises(InputError, match="k_offset"):
        compress(torch.zeros(4, 8, dtype=torch.int8, device=device), Pattern(2, 4), k_offset=4)
