from __future__ import annotations

import pytest
import torch
from fp4_oracles import joined_columns

from slidesparse import InputError, Pattern
from slidesparse.weights.fp4 import MXFP4, NVFP4, Fp4Format, Span, lift_scale, quantize_fp4, span

FORMATS = pytest.mark.parametrize("fp4", [NVFP4, MXFP4], ids=lambda fp4: fp4.name)


def _pattern(n: int) -> Pattern:
    return Pattern(2 * n - 2, 2 * n)


@pytest.mark.parametrize(
    ("fp4", "shared"),
    [(NVFP4, {"2:4": 32, "4:6": 48, "6:8": 64, "8:10": 80}), (MXFP4, {"2:4": 64, "4:6": 96, "6:8": 128, "8:10": 160})],
    ids=lambda value: getattr(value, "name", ""),
)
def test_columns_that_share_a_scale(fp4: Fp4Format, shared: dict[str, int]) -> None:
    assert {pattern: span(pattern, fp4).shared for pattern in shared} == shared


def test_the_drawn_span() -> None:
    assert span("6:8", NVFP4) == Span(columns=64, shared=64)


@FORMATS
@pytest.mark.parametrize("n", range(2, 17))
def test_the_formula_is_what_joining_finds(fp4: Fp4Format, n: int) -> None:
    found = span(_pattern(n), fp4)
    wanted = [set(range(start, start + found.shared)) for start in (0, found.shared)]
    assert joined_columns(n, fp4.block, fp4.vector, 2 * found.shared) == wanted
    assert joined_columns(n, 1, fp4.vector, 2 * found.columns)[0] == set(range(found.columns))


@FORMATS
@pytest.mark.parametrize("n", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("extra", [-6, 0, 2, 22])
def test_shared_scales_line_up(fp4: Fp4Format, n: int, extra: int) -> None:
    pattern, shared = _pattern(n), span(_pattern(n), fp4).shared
    x = torch.randn(3, 3 * shared + extra) * torch.exp(torch.randn(3, 3 * shared + extra))
    q = quantize_fp4(x, fp4, share=shared)
    # One scale that differs inside any set of columns that must share is enough to refuse.
    for block in range(1, q.scale.shape[1]):
        bits = q.scale.view(torch.uint8).clone()
        bits[:] = 64
        bits[1, block:] = 65
        changed = type(q)(fp4, q.pairs, bits.view(fp4.scale_dtype), q.tensor_scale, fp4.block)
        if block * fp4.block % shared == 0:
            lift_scale(changed, pattern)
        else:
            with pytest.raises(InputError, match="of row 1, vector"):
                lift_scale(changed, pattern)


def test_an_ordinary_tensor_is_refused_with_the_remedy() -> None:
    q = quantize_fp4(torch.arange(1.0, 129.0).view(1, 128), NVFP4)
    with pytest.raises(InputError, match=r"k_proj.*share=64"):
        lift_scale(q, "6:8", "k_proj")


@pytest.mark.parametrize("pattern", ["dense", "4:6@50%"])
def test_partial_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="uniform"):
        span(pattern, NVFP4)
