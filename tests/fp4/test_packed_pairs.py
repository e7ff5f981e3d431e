from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slidesparse import InputError, Pattern, PatternViolation
from slidesparse.prune.mask import pair_mask
from slidesparse.weights.fp4 import (
    MXFP4,
    NVFP4,
    ExactProduct,
    Fp4Format,
    Fp4Tensor,
    decode,
    pack_pairs,
    product,
    quantize_fp4,
    span,
    unpack_bytes,
)


def number(exact: ExactProduct) -> torch.Tensor:
    """The product in float64, rounded only here."""
    return exact.total.to(torch.float64) * 2.0**exact.exponent * exact.tensor_scale


FORMATS = pytest.mark.parametrize("fp4", [NVFP4, MXFP4], ids=lambda fp4: fp4.name)
PATTERNS = pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10", "30:32"])
LEGAL_NIBBLES = {0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110}
"""Of PTX's "only meaningful values", those in ascending order."""


def _pruned(pattern: str, fp4: Fp4Format, columns: int, out: int = 5) -> Fp4Tensor:
    weight = torch.randn(out, columns) * torch.exp(torch.randn(out, columns))
    return quantize_fp4(weight * pair_mask(weight, pattern), fp4, share=span(pattern, fp4).shared)


# -- masks ---------------------------------------------------------------------------------------------------------


@PATTERNS
@pytest.mark.parametrize("columns", [64, 66, 130])
def test_masks_remove_the_two_cheapest_pairs_of_every_group(pattern: str, columns: int) -> None:
    weight = torch.randn(4, columns)
    mask, group = pair_mask(weight, pattern), Pattern.parse(pattern).group
    cost = weight.double().square().view(4, -1, 2).sum(-1)
    for row, start in itertools.product(range(4), range(0, columns // 2, group)):
        pairs = range(start, min(start + group, columns // 2))
        missing = group - len(pairs)  # pairs after the end count as left out
        dropped = {pair for pair in pairs if not mask[row, 2 * pair]}
        assert dropped == set(sorted(pairs, key=lambda pair: cost[row, pair])[: max(2 - missing, 0)])
    assert torch.equal(mask[:, ::2], mask[:, 1::2])


def test_a_given_cost_counts_and_not_the_weight() -> None:
    cost = torch.tensor([[9.0, 0, 1, 1, 5, 5, 0, 3]])
    assert pair_mask(torch.ones(1, 8), "2:4", cost).int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]


def test_costs_too_large_to_add_are_not_cheap() -> None:
    huge = torch.tensor([[3e38, 3e38, 1, 1, 2, 2, 3e38, 3e38], [3e38, 3e38, 3e38, 3e38, 3e38, 3e38, 1, 1]])
    wanted = [[1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]]  # the later of equals goes
    assert pair_mask(torch.ones(2, 8), "2:4", huge).int().tolist() == wanted


@pytest.mark.parametrize(
    ("columns", "cost", "message"),
    [
        (7, None, "in pairs"),
        (8, torch.ones(1, 4), "pruning cost"),
        (8, torch.tensor([[-1.0, 2, 1, 1, 1, 1, 1, 1]]), "negative"),
        (8, torch.full((1, 8), float("inf")), "Inf"),
    ],
)
def test_masks_that_cannot_be_made_are_refused(columns: int, cost: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pair_mask(torch.ones(1, columns), "2:4", cost)


# -- packing -------------------------------------------------------------------------------------------------------


@FORMATS
@PATTERNS
@pytest.mark.parametrize("columns", [2, 18, 64, 192, 330])
def test_packing_and_back(pattern: str, fp4: Fp4Format, columns: int) -> None:
    weight = _pruned(pattern, fp4, columns)
    back = pack_pairs(weight, pattern).unpack()
    assert torch.equal(back.pairs, weight.pairs)
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert back.tensor_scale == weight.tensor_scale


@FORMATS
@PATTERNS
def test_the_instruction_reads_two_of_four_pairs(pattern: str, fp4: Fp4Format) -> None:
    """Rebuild the slid weight from kept pairs and nibbles alone, as the hardware does."""
    packed = pack_pairs(_pruned(pattern, fp4, 200), pattern)
    nibbles = packed.metadata()
    assert set(nibbles.flatten().tolist()) <= LEGAL_NIBBLES
    kept = packed.packed.segments[0].values.view(torch.uint8).unflatten(-1, (-1, 2))
    rebuilt = torch.zeros(*nibbles.shape, 4, dtype=torch.uint8)
    rebuilt.scatter_(-1, (nibbles & 3).long().unsqueeze(-1), kept[..., :1])
    rebuilt.scatter_(-1, (nibbles >> 2).long().unsqueeze(-1), kept[..., 1:])
    slid = packed.operand()
    assert torch.equal(rebuilt.flatten(1), slid.pairs[:, : rebuilt.shape[1] * 4])
    assert slid.columns % fp4.vector == 0
    assert not slid.pairs[:, rebuilt.shape[1] * 4 :].any()


def test_every_support_of_pairs_and_every_zero() -> None:
    """All ways to leave out two of eight pairs, with zeros of both signs where they are left out."""
    left_out = list(itertools.combinations(range(8), 2))
    codes = torch.randint(1, 8, (len(left_out), 16)).to(torch.uint8)
    for row, pairs in enumerate(left_out):
        for pair, zeros in zip(pairs, ((0, 8), (8, 8)), strict=True):
            codes[row, 2 * pair : 2 * pair + 2] = torch.tensor(zeros, dtype=torch.uint8)
    scale = torch.ones(len(codes), 1).to(torch.float8_e4m3fn)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    weight = Fp4Tensor(NVFP4, pairs, scale, torch.ones(()), 16)
    back = pack_pairs(weight, "6:8").unpack()
    assert torch.equal(unpack_bytes(back.pairs), torch.where(codes == 8, 0, codes))


def test_bytes_of_the_packed_form() -> None:
    """Values, metadata and scales; docs/fp4.md gives them, and says 8 % and 2 % fewer than 4.5."""
    columns, out = 3840, 2
    bits = {}
    for pattern in ("2:4", "4:6", "6:8", "8:10"):
        packed = pack_pairs(quantize_fp4(torch.zeros(out, columns), NVFP4), pattern)
        bits[pattern] = round(8 * packed.n_bytes / (out * columns), 3)
    assert bits == {"2:4": 2.75, "4:6": 3.667, "6:8": 4.125, "8:10": 4.4}


def test_the_example_and_the_drawing_of_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs/fp4.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    (row,) = re.findall(r"^weights +(\|[\d |]+\|)", text, re.MULTILINE)
    numbers = torch.tensor([[float(number) for number in re.findall(r"\d", row)]])
    packed = pack_pairs(quantize_fp4(numbers, MXFP4), "6:8")
    nibbles = [f"{nibble & 3}, {nibble >> 2}" for nibble in packed.metadata()[0].tolist()]
    assert re.findall(r"metadata (\d, \d)", text) == nibbles
    kept = packed.packed.segments[0].values.view(torch.uint8)
    found = re.findall(r"2 kept: +(\d) (\d) \| (\d) (\d)", text)
    assert [[float(number) for number in window] for window in found] == decode(unpack_bytes(kept)).view(3, 4).tolist()


def test_a_weight_that_was_pruned_by_weights_is_refused() -> None:
    weight = quantize_fp4(torch.tensor([[0.0, 1] * 8]), NVFP4)  # half of the weights are zero, and no pair is
    with pytest.raises(PatternViolation, match="pair_mask") as caught:
        pack_pairs(weight, "6:8")
    assert (caught.value.row, caught.value.group, caught.value.count) == (0, 0, 8)


def test_scales_that_do_not_line_up_are_refused_and_nothing_is_rounded_again() -> None:
    weight = torch.randn(2, 128) * pair_mask(torch.randn(2, 128), "6:8")
    with pytest.raises(InputError, match="line up"):
        pack_pairs(quantize_fp4(weight, NVFP4), "6:8")


# -- activations ---------------------------------------------------------------------------------------------------


@FORMATS
@PATTERNS
def test_every_copy_of_a_column_has_its_value(pattern: str, fp4: Fp4Format) -> None:
    packed = pack_pairs(_pruned(pattern, fp4, 328), pattern)
    x = quantize_fp4(torch.randn(3, 328), fp4, share=span(pattern, fp4).shared)
    lifted, numbers, n = packed.lift(x).dequantize(), x.dequantize(), Pattern.parse(pattern).group // 2
    for group, window, column in itertools.product(range(-(-328 // (4 * n))), range(n - 1), range(8)):
        source = 4 * n * group + 4 * window + column
        copy = lifted[:, 8 * (n - 1) * group + 8 * window + column]
        assert torch.equal(copy, numbers[:, source] if source < 328 else torch.zeros(3, dtype=torch.float64))


def test_activations_that_do_not_fit_are_refused() -> None:
    packed = pack_pairs(_pruned("6:8", NVFP4, 64), "6:8")
    x = quantize_fp4(torch.arange(1.0, 65.0).view(1, 64), NVFP4, share=64)
    with pytest.raises(InputError, match="activations"):
        packed.lift(quantize_fp4(torch.ones(1, 32), NVFP4))
    with pytest.raises(InputError, match="mxfp4"):
        packed.lift(quantize_fp4(torch.ones(1, 64), MXFP4))
    with pytest.raises(InputError, match="activations"):
        packed.lift(packed.lift(x))
    with pytest.raises(InputError, match="line up"):
        packed.lift(quantize_fp4(torch.arange(1.0, 65.0).view(1, 64), NVFP4))


# -- the product ---------------------------------------------------------------------------------------------------


@FORMATS
@PATTERNS
@pytest.mark.parametrize(("tokens", "out", "columns"), [(1, 1, 2), (3, 5, 64), (2, 4, 250), (4, 3, 1026)])
def test_the_lifted_product_is_the_dense_one(pattern: str, fp4: Fp4Format, tokens: int, out: int, columns: int) -> None:
    weight, share = _pruned(pattern, fp4, columns, out), span(pattern, fp4).shared
    x = quantize_fp4(torch.randn(tokens, columns) * torch.exp(torch.randn(tokens, columns)), fp4, share=share)
    packed = pack_pairs(weight, pattern)
    dense, lifted = product(x, weight), product(packed.lift(x), packed.operand())
    assert torch.equal(lifted.total, dense.total)
    assert (lifted.exponent, lifted.tensor_scale) == (dense.exponent, dense.tensor_scale)
    assert torch.equal(number(lifted), number(dense))
    assert bool(dense.total.any())


@FORMATS
def test_the_product_is_that_of_the_numbers(fp4: Fp4Format) -> None:
    """Against float64 sums of numbers with few bits, which are exact too."""
    x, weight = (quantize_fp4(torch.randn(3, 96), fp4) for _ in range(2))
    x, weight = (replace(tensor, tensor_scale=torch.tensor(0.25)) for tensor in (x, weight))
    found = product(x, weight)
    assert torch.equal(number(found), x.dequantize() @ weight.dequantize().T)
    assert found.total.dtype == torch.int64


def test_blocks_of_zeros_do_not_widen_the_sum() -> None:
    x = torch.zeros(1, 64)
    x[0, 0] = 2.0**60
    q = quantize_fp4(x, MXFP4)
    assert q.scale.tolist() == [[127 + 58, 0]]
    assert number(product(q, q)).item() == 2.0**120
    assert number(product(quantize_fp4(0 * x, MXFP4), q)).item() == 0
    ones = quantize_fp4(torch.where(x == 0, x, 1.0), MXFP4)
    far = replace(ones, scale=torch.tensor([[ones.scale[0, 0], 250]], dtype=torch.uint8))
    assert number(product(far, far)).item() == 1


@pytest.mark.parametrize(("far", "message"), [(2.0**70, "63 bits"), (2.0**30, "63 bits")])
def test_scales_too_far_apart_for_an_exact_sum_are_refused(far: float, message: str) -> None:
    x = torch.ones(1, 64)
    x[0, 0] = far
    q = quantize_fp4(x, MXFP4)
    with pytest.raises(InputError, match=message):
        product(q, q)


def test_the_bound_of_the_sum_is_where_int64_ends() -> None:
    """The largest totals that are let through do not wrap around."""
    x = torch.full((1, 64), 6.0)
    x[0, :32] = 6.0 * 2.0**24
    q = quantize_fp4(x, MXFP4)
    assert number(product(q, q)).item() == 32 * 36 * (1 + 4.0**24)


def test_operands_of_two_kinds_are_refused() -> None:
    weight = _pruned("6:8", NVFP4, 64)
    packed = pack_pairs(weight, "6:8")
    with pytest.raises(InputError, match="do not fit"):
        product(weight, packed.operand())
