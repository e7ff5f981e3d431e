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


def test_held_rows_get_few_lanes_and_few_rows_many() -> None:
    warps = {k: configure(4096, ColumnOrder.identity(k), 2, "none").num_warps for k in (2048, 3584, 8192, 18944)}
    assert warps == {2048: launch.FEWEST_WARPS, 3584: 2, 8192: 4, 18944: 16}
    assert configure(1, ColumnOrder.identity(3584), 2, "none").num_warps == 8
    assert configure(1, ColumnOrder.identity(600), 2, "none").num_warps == 2
    assert configure(4096, ColumnOrder.identity(3584), 2, "add_rms_norm").num_warps == 8
    assert configure(4096, ColumnOrder.identity(18944), 2, "add_rms_norm").num_warps == 16


def test_three_programs_share_a_multiprocessor_where_they_can() -> None:
    def registers(columns: int, itemsize: int = 2, prologue: str = "none") -> int:
        return configure(4096, ColumnOrder.identity(columns), itemsize, prologue).registers

    assert [registers(columns) for columns in (8192, 18944, 24576, 32768)] == [0, 40, 40, 0]
    assert registers(18944, itemsize=4) == registers(18944, prologue="silu_mul") == 0


def test_walked_rows_in_flight_fit_l1_and_few_rows_get_all_lanes() -> None:
    def warps(columns: int, tokens: int = 4096, prologue: str = "none") -> int:
        return configure(tokens, ColumnOrder.identity(columns), 2, prologue, False).num_warps

    assert {columns: warps(columns) for columns in (3584, 8192)} == {3584: 4, 8192: 8}
    assert warps(18944) == 16
    assert warps(4096, prologue="silu_mul") == 8
    assert warps(3584, tokens=1) == 8
