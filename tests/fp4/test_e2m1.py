from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from fp4_oracles import nearest, value
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.weights.fp4 import decode, encode, pack_bytes, unpack_bytes

CODES = torch.arange(16, dtype=torch.uint8)
ONE = torch.ones((), dtype=torch.float64)


def test_every_code_has_the_value_of_its_bits() -> None:
    assert [Fraction(x) for x in decode(CODES).tolist()] == [value(code) for code in range(16)]
    assert math.copysign(1, decode(CODES)[8].item()) == -1


def test_every_value_is_its_own_nearest_and_negative_zero_is_not_written() -> None:
    assert encode(decode(CODES), ONE).tolist() == [code if code != 8 else 0 for code in range(16)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_at_all_midpoints_and_next_to_them(dtype: torch.dtype) -> None:
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=dtype)
    step = torch.finfo(dtype).eps * middle
    x = torch.cat([middle - step, middle, middle + step])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 1e4, -1e4], dtype=dtype)])
    assert encode(x, ONE).tolist() == [nearest(Fraction(number)) for number in x.tolist()]


@given(x=st.floats(-1e3, 1e3), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_scaled_values_are_rounded_once(x: float, scale: float) -> None:
    code = encode(torch.tensor([x], dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))
    assert code.item() == nearest(Fraction(x) / Fraction(scale))


def test_a_scale_of_zero_gives_zeros() -> None:
    assert encode(torch.tensor([1.0, -1.0]), torch.zeros((), dtype=torch.float64)).tolist() == [0, 0]


def test_every_pair_is_a_byte_with_the_earlier_column_low() -> None:
    pairs = torch.cartesian_prod(CODES, CODES)
    packed = pack_bytes(pairs).flatten()
    assert packed.tolist() == [low + 16 * high for low, high in pairs.tolist()]
    assert torch.equal(unpack_bytes(packed).view(-1, 2), pairs)
