"""The launch rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slidesparse.lifting import launch
from slidesparse.lifting.launch import Launch, configure, make_variant
from slidesparse.lifting.layout import ColumnOrder, Layout, LiftSpec
from slidesparse.lifting.variant import LiftVariant


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("columns", [4, 640, 8192, 16384, 65536, 600000])
def test_the_rule_gives_a_launch_for_any_size(columns: int, quantised: bool) -> None:
    order = ColumnOrder.identity(columns)
    for tokens in (1, 4096):
        chosen = configure(tokens, order, 2, "none", quantised)
        assert chosen.read == 8 * 32 * chosen.num_warps
        assert chosen.num_warps == (launch.FEWEST_WARPS if quantised else 1) or chosen.read <= columns


def variant_of(columns: ColumnOrder, launch: Launch) -> LiftVariant:
    return make_variant(LiftSpec("none", torch.bfloat16, torch.int8, tuple(columns.numbers), Layout()), launch)


@pytest.mark.parametrize("columns", [4, 2048, 2052, 18944, 32768])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_rows_are_held_as_long_as_they_fit(columns: int, tokens: int) -> None:
    order = ColumnOrder.identity(columns)
    assert variant_of(order, configure(tokens, order, 2, "none")).resident
    longer = ColumnOrder.identity(32768 + 4)
    assert not variant_of(longer, configure(tokens, longer, 2, "none")).resident
    odd = replace(order, k_offset=1)
    assert not variant_of(odd, configure(tokens, odd, 2, "none")).resident


def chosen(columns: int, prologue: str = "none", tokens: int = 4096, itemsize: int = 2, held: bool = True) -> Launch:
    return configure(tokens, ColumnOrder.identity(columns), itemsize, prologue, held)


def test_held_rows_get_few_lanes_few_rows_many_and_walked_rows_in_flight_fit_l1() -> None:
    held = {columns: chosen(columns).num_warps for columns in (2048, 3584, 8192, 18944)}
    assert held == {2048: launch.FEWEST_WARPS, 3584: 2, 8192: 4, 18944: 16}
    assert [chosen(columns, tokens=1).num_warps for columns in (600, 3584)] == [2, 8]
    assert [chosen(columns, "add_rms_norm").num_warps for columns in (3584, 18944)] == [8, 16]
    assert [chosen(columns, held=False).num_warps for columns in (3584, 8192, 18944)] == [4, 8, 16]
    assert chosen(4096, "silu_mul", held=False).num_warps == chosen(3584, tokens=1, held=False).num_warps == 8


def test_three_programs_share_a_multiprocessor_where_they_can() -> None:
    assert [chosen(columns).registers for columns in (8192, 18944, 24576, 32768)] == [0, 40, 40, 0]
    assert chosen(18944, itemsize=4).registers == chosen(18944, "silu_mul", tokens=64).registers == 0


def test_wide_rows_of_silu_spill_a_little_so_that_two_programs_share_a_multiprocessor() -> None:
    assert [chosen(columns, "silu_mul").registers for columns in (8192, 18944, 27648, 29568)] == [0, 64, 64, 96]
