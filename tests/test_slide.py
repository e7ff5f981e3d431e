from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import greedy_slide, lift_row, random_int8, supports

from slidesparse import InputError, Pattern, lift, pack, prune_mask
from slidesparse.weights.slide import (
    compress,
    decode_group,
    decompress,
    encode_group,
    expand,
    gather,
    left_out,
    metadata,
    window_indices,
)
from slidesparse.weights.support import INT_VIEW

LEGAL_NIBBLES = {0x4, 0x8, 0xC, 0x9, 0xD, 0xE}
"""index0 < index1 in two bits each: 01, 02, 03, 12, 13, 23."""


def _pattern(n: int) -> Pattern:
    return Pattern(2 * n - 2, 2 * n)


def _check_group_by_group(weight: torch.Tensor, pattern: Pattern) -> None:
    """Everything that the closed form promises, for int8 rows of one group each: [rows, 2N]."""
    groups = weight.unsqueeze(1)
    values, code = compress(groups, pattern)
    assert values.shape == (len(weight), pattern.keep)
    assert torch.equal(decompress(values, code, pattern), groups)

    slid = expand(values, code, pattern)
    assert slid.shape == (len(weight), pattern.slid_group)
    assert int((slid.unflatten(-1, (-1, 4)) != 0).sum(-1).max()) <= 2

    x = torch.randint(-128, 128, (3, pattern.group))
    exact = x @ weight.long().T
    assert torch.equal(lift(x.to(torch.int8), pattern).long() @ slid.long().T, exact)

    nibbles = metadata(code, pattern).long()
    assert set(nibbles.unique().tolist()) <= LEGAL_NIBBLES
    # Rebuild the 2:4 matrix from values and nibbles alone, as the hardware does.
    rebuilt = torch.zeros(len(weight), pattern.windows, 4, dtype=torch.int8)
    pairs = values.unflatten(-1, (-1, 2))
    rebuilt.scatter_(-1, (nibbles & 3).unsqueeze(-1), pairs[..., :1])
    rebuilt.scatter_(-1, (nibbles >> 2).unsqueeze(-1), pairs[..., 1:])
    assert torch.equal(rebuilt.flatten(1), slid)


@pytest.mark.parametrize("n", range(2, 7))
def test_every_support(n: int) -> None:
    weight = random_int8(supports(2 * n, 2 * n - 2))
    assert len(weight) == 2 ** (2 * n) - 2 * n - 1
    _check_group_by_group(weight, _pattern(n))


@given(n=st.integers(7, 16), data=st.data())
def test_large_groups(n: int, data: st.DataObject) -> None:
    zeros = data.draw(st.lists(st.sets(st.integers(0, 2 * n - 1), min_size=2), min_size=1, max_size=8))
    support = np.ones((len(zeros), 2 * n), dtype=bool)
    for row, positions in enumerate(zeros):
        support[row, list(positions)] = False
    _check_group_by_group(random_int8(support, data.draw(st.integers(0, 2**32))), _pattern(n))


@pytest.mark.parametrize("n", range(2, 6))
def test_the_papers_greedy_packer_gives_the_same_products(n: int) -> None:
    weight = random_int8(supports(2 * n, 2 * n - 2))
    slid = expand(*compress(weight.unsqueeze(1), _pattern(n)), _pattern(n))
    x = torch.randint(-128, 128, (2 * n,))
    lifted = torch.tensor(lift_row(x.tolist(), n))
    assert torch.equal(lift(x.to(torch.int8), _pattern(n)).long(), lifted)
    for row, ours in zip(weight.tolist(), slid, strict=True):
        greedy, used = greedy_slide(row, n)
        assert used == [value != 0 for value in row]
        assert int((lifted * torch.tensor(greedy)).sum()) == int((lifted * ours.long()).sum())


@pytest.mark.parametrize("n", [2, 3, 4, 11, 12, 16])
def test_code_of_every_pair(n: int) -> None:
    pattern = _pattern(n)
    pairs = torch.tensor([(a, b) for b in range(2 * n) for a in range(b)], dtype=torch.int8)
    a, b = pairs.unbind(-1)
    code = encode_group(a, b, pattern)
    assert code.dtype == (torch.uint8 if pattern.codes <= 256 else torch.int16)
    assert sorted(code.tolist()) == list(range(pattern.codes))
    assert [position.tolist() for position in decode_group(code, pattern)] == [a.tolist(), b.tolist()]
    # Entry i stands at window * 2 + index: the positions of a group without a and b, in order.
    positions = window_indices(code.unsqueeze(1), pattern).long() + torch.arange(pattern.keep) // 2 * 2
    expected = [[p for p in range(2 * n) if p not in pair] for pair in pairs.tolist()]
    assert positions.tolist() == expected


@pytest.mark.parametrize("code", [-3, 28, 255])
def test_code_out_of_range(code: int) -> None:
    with pytest.raises(InputError, match=f"group code of 6:8; got {code};"):
        decode_group(torch.tensor([[5, code]], dtype=torch.int16), Pattern(6, 8))


def test_left_out_are_the_last_two_zeros() -> None:
    groups = torch.tensor([[5, 0, 7, 1, 0, 2, 0, 3], [0, 0, 1, 1, 1, 1, 1, 1], [0] * 8])
    a, b = left_out(groups.to(torch.int8))
    assert (a.tolist(), b.tolist()) == ([4, 0, 6], [6, 1, 7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_negative_zero_is_packed_as_zero(dtype: torch.dtype) -> None:
    # Six values and two -0.0: were -0.0 a non-zero, the group would hold eight and lose two.
    group = torch.tensor([[[1.0, -0.0, 2.0, -0.0, 3.0, -4.0, 5.0, 6.0]]]).to(dtype)
    values, code = compress(group, Pattern(6, 8))
    assert values.to(torch.float32).tolist() == [[1, 2, 3, -4, 5, 6]]
    whole = torch.zeros(1, 1, 8).to(dtype)
    whole.view(INT_VIEW[dtype])[:] = torch.tensor([[[-0.0] * 8]]).to(dtype).view(INT_VIEW[dtype])
    values, code = compress(whole, Pattern(6, 8))
    for part in (values, decompress(values, code, Pattern(6, 8)), expand(values, code, Pattern(6, 8))):
        assert not part.view(INT_VIEW[dtype]).any()


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
@pytest.mark.parametrize("k_offset", [0, 3, 7])
def test_lift_moves_bits(dtype: torch.dtype, k_offset: int) -> None:
    x = torch.randn(2, 3, 21).mul(100).to(dtype)
    lifted = lift(x, "6:8", k_offset)
    padded = torch.nn.functional.pad(x.to(torch.float32), (k_offset, -(k_offset + 21) % 8))
    expected = [lift_row(row, 4) for row in padded.flatten(0, 1).tolist()]
    assert lifted.dtype == dtype
    assert lifted.to(torch.float32).flatten(0, 1).tolist() == expected


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("columns", [48, 45])
def test_a_lift_has_the_gradient_of_a_copy(pattern: str, columns: int) -> None:
    """It was lost without a word: what was lifted did not require a gradient."""
    weight = torch.randn(8, columns)
    packed = pack(weight * prune_mask(weight, pattern), pattern)
    x = torch.randn(3, columns, requires_grad=True)
    lifted = packed.lift(x)
    (lifted @ packed.columns().T).sum().backward()
    torch.testing.assert_close(x.grad, packed.unpack().sum(0).expand(3, columns))
    assert torch.equal(lifted, packed.lift(x.detach()))
    (gradient,) = torch.autograd.grad((lift(x, pattern) @ packed.columns().T).sum(), x)
    assert torch.equal(gradient, x.grad)


def test_lift_takes_any_strides_and_no_rows() -> None:
    x = torch.randn(16, 5).T
    assert torch.equal(lift(x, "6:8"), lift(x.contiguous(), "6:8"))
    assert lift(torch.zeros(0, 16), "6:8").shape == (0, 24)


@pytest.mark.parametrize("arguments", [("dense",), ("6:8", 8), ("6:8", -1)])
def test_lift_refuses(arguments: tuple[object, ...]) -> None:
    with pytest.raises(InputError):
        lift(torch.zeros(1, 8), *arguments)
    with pytest.raises(InputError):
        lift(torch.zeros(1, 8, dtype=torch.float64), "6:8")


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
def test_gather_reads_zero_where_the_map_says_so(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]]).to(dtype)
    assert gather(x, torch.tensor([2, -1, 0, 0])).to(torch.float32).tolist() == [[3, 0, 1, 1]]
