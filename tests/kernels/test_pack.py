"""The packing kernel against its torch definition, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from slidesparse.errors import InputError, PatternViolation
from slidesparse.pruning import prune_mask
from slidesparse.weights import pack_kernel as kernels
from slidesparse.weights.pack_kernel import BLOCK, KernelPacker
from slidesparse.weights.packed import TORCH, Shard, pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import as_bits


def compress_groups(
    weight: torch.Tensor, pattern: Pattern, k_offset: int = 0, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept values and codes of all groups, checked."""
    return KernelPacker().compress(Shard(weight, pattern, k_offset, name), checked=False)


TYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def sparse(pattern: str, columns: int, dtype: torch.dtype, k_offset: int = 0, rows: int = 3) -> torch.Tensor:
    """A weight [rows, columns] that satisfies its pattern from ``k_offset`` on; its zeros are -0 where it has
    them, and it has more than it must.
    """
    whole = torch.randn(rows, columns + k_offset) * 20
    whole[:, :k_offset] = 0
    kept = prune_mask(whole, pattern) & (whole.abs() > 2)
    return torch.where(kept, whole, -0.0)[:, k_offset:].to(dtype).contiguous()


@pytest.mark.parametrize(
    ("pattern", "columns", "k_offset", "dtype"),
    [
        *((pattern, 100, start, torch.int8) for pattern in ("2:4", "6:8", "14:16", "22:24") for start in (0, 3)),
        *(("6:8", 50, 0, dtype) for dtype in TYPES),
        ("2:4", 4 * BLOCK + 6, 0, torch.int8),  # more groups than one program treats
    ],
)
def test_values_and_codes_are_those_of_the_definition(
    device: str, pattern: str, columns: int, k_offset: int, dtype: torch.dtype
) -> None:
    weight = sparse(pattern, columns, dtype, k_offset)
    wanted = pack_by(weight, pattern, k_offset=k_offset)
    values, code = compress_groups(weight.to(device), Pattern.parse(pattern), k_offset=k_offset)
    assert values.dtype == dtype
    assert torch.equal(as_bits(values).cpu(), as_bits(wanted.values))
    assert torch.equal(code.cpu(), wanted.code)
    assert code.dtype == wanted.code.dtype


def test_rows_may_lie_anywhere(device: str) -> None:
    weight = sparse("6:8", 32, torch.int8, rows=6)
    wide = torch.cat([torch.ones(6, 3, dtype=torch.int8), weight], 1).to(device)
    values, _ = compress_groups(wide[::2, 3:], Pattern(6, 8))
    assert torch.equal(values.cpu(), pack_by(weight[::2], "6:8").values)


def test_no_rows(device: str) -> None:
    values, code = compress_groups(torch.zeros(0, 16, dtype=torch.int8, device=device), Pattern(6, 8))
    assert values.shape == (0, 12)
    assert code.shape == (0, 2)


NON_FINITE = [(torch.float8_e4m3fn, float("nan"))]  # which has no infinity
NON_FINITE += [(dtype, float(fault)) for dtype in TYPES[2:] for fault in ("nan", "-inf")]


@pytest.mark.parametrize(("dtype", "fault"), NON_FINITE)
def test_what_is_not_finite_is_refused(device: str, dtype: torch.dtype, fault: float) -> None:
    weight = sparse("6:8", 64, dtype)
    weight[2, 5] = fault
    weight[2, 0:2] = 0
    with pytest.raises(InputError):
        compress_groups(weight.to(device), Pattern(6, 8))


# -- the whole of pack ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_a_shard_is_checked_first_and_then_packed(device: str, pattern: str) -> None:
    weight, packer = sparse(pattern, 91, torch.int8, 3), KernelPacker()
    there = weight.to(device)
    packer.check(Shard(there, Pattern.parse(pattern), 3, "weight"))
    wanted = pack_by(weight, pattern, k_offset=3)
    got = pack_by(there, pattern, k_offset=3, checked=True, packer=packer)
    assert torch.equal(got.values.cpu(), wanted.values)
    assert torch.equal(got.code.cpu(), wanted.code)
    there[2, 5:13] = 1
    for check in (packer.check, TORCH.check):
        with pytest.raises(PatternViolation, match=f"q violates {pattern} at row 2"):
            check(Shard(there, Pattern.parse(pattern), 3, "q"))


def faulty() -> dict[str, tuple[torch.Tensor, str, dict[str, object]]]:
    """Weight, pattern and arguments of what pack must refuse."""
    weight, floats = sparse("6:8", 64, torch.int8), sparse("6:8", 64, torch.bfloat16)
    dense, broken = torch.ones(3, 64, dtype=torch.int8), floats.clone()
    broken[2, 5] = float("nan")
    return {
        "violation": (dense, "6:8", {}),
        "an offset that is none": (weight, "6:8", {"k_offset": 8}),
        "NaN": (broken, "6:8", {}),
        "NaN in a dense weight": (broken, "dense", {}),
        "a scale too long": (weight, "6:8", {"scale": torch.ones(4)}),
        "no columns": (weight[:, :0], "6:8", {}),
        "three dimensions": (weight.unsqueeze(0), "6:8", {}),
    }


@pytest.mark.parametrize("case", faulty())
def test_errors_are_those_of_the_definition(device: str, case: str) -> None:
    weight, pattern, arguments = faulty()[case]
    there = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(InputError) as wanted:
        pack_by(weight, pattern, name="q_proj", **arguments)
    with pytest.raises(InputError) as got:
        pack_by(weight.to(device), pattern, name="q_proj", packer=KernelPacker(), **there)
    assert type(got.value) is type(wanted.value)
    assert str(got.value) == str(wanted.value)


def test_kernels_run_where_the_weight_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton launches on the current device, whatever the device of the tensors.
    inside: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        inside.append(tensor)
        yield
        inside.remove(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    run = kernels.Launcher.run
    monkeypatch.setattr(kernels.Launcher, "run", lambda *given: run(*given) if inside else pytest.fail("outside"))
    weight = sparse("6:8", 64, torch.int8).to(device)
    packed = pack_by(weight, Pattern(6, 8), packer=KernelPacker())
    assert torch.equal(packed.unpack(), weight)
    assert not inside
