"""The launch rule and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slidesparse.errors import InputError
from slidesparse.kernels import lift_launch as launch
from slidesparse.kernels.lift import make_plan
from slidesparse.kernels.lift_launch import Entry, Launch, configure, load_table
from slidesparse.kernels.lift_variant import Plan
from slidesparse.layout import Columns

ENTRY = {"first": "none", "columns": 8192, "group": 4, "min_tokens": 64, "read": 1024, "write": 2048, "num_warps": 4}
ENTRY["registers"] = 0


def table(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_table_that_ships_can_be_read() -> None:
    assert all(arch >= 80 for arch in load_table(launch.TABLE))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("columns", [4, 640, 8192, 16384, 65536, 600000])
def test_the_rule_gives_a_launch_for_any_size(columns: int, quantised: bool) -> None:
    order = Columns.identity(columns)
    for tokens in (1, 4096):
        chosen = configure(0, tokens, order, 2, "none", quantised)
        assert chosen.read == 8 * 32 * chosen.num_warps
        assert chosen.num_warps == (launch.FEWEST_HOLDING if quantised else 1) or chosen.read <= columns


def plan_of(columns: Columns, launch: Launch) -> Plan:
    return make_plan(columns, torch.bfloat16, torch.int8, "none", None, launch)


@pytest.mark.parametrize("columns", [4, 2048, 2052, 18944, 32768])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_rows_are_held_as_long_as_they_fit(columns: int, tokens: int) -> None:
    order = Columns.identity(columns)
    assert plan_of(order, configure(90, tokens, order, 2, "none")).held
    longer = Columns.identity(32768 + 4)
    assert not plan_of(longer, configure(90, tokens, longer, 2, "none")).held
    odd = replace(order, k_offset=1)
    assert not plan_of(odd, configure(90, tokens, odd, 2, "none")).held


def test_held_rows_get_few_lanes_and_few_rows_many() -> None:
    warps = {k: configure(0, 4096, Columns.identity(k), 2, "none").num_warps for k in (2048, 3584, 8192, 18944)}
    assert warps == {2048: launch.FEWEST_HOLDING, 3584: 2, 8192: 4, 18944: 16}
    assert configure(0, 1, Columns.identity(3584), 2, "none").num_warps == 8
    assert configure(0, 1, Columns.identity(600), 2, "none").num_warps == 2
    assert configure(0, 4096, Columns.identity(3584), 2, "add_rms_norm").num_warps == 8
    assert configure(0, 4096, Columns.identity(18944), 2, "add_rms_norm").num_warps == 16


def test_three_programs_share_a_multiprocessor_where_they_can() -> None:
    def registers(columns: int, itemsize: int = 2, first: str = "none") -> int:
        return configure(90, 4096, Columns.identity(columns), itemsize, first).registers

    assert [registers(columns) for columns in (8192, 18944, 24576, 32768)] == [0, 40, 40, 0]
    assert registers(18944, itemsize=4) == registers(18944, first="silu_mul") == 0


def test_walked_rows_in_flight_fit_l1_and_few_rows_get_all_lanes() -> None:
    def warps(columns: int, tokens: int = 4096, first: str = "none") -> int:
        return configure(0, tokens, Columns.identity(columns), 2, first, False).num_warps

    assert {columns: warps(columns) for columns in (3584, 8192)} == {3584: 4, 8192: 8}
    assert warps(18944) == 16
    assert warps(4096, first="silu_mul") == 8
    assert warps(3584, tokens=1) == 8


def test_a_measured_launch_beats_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**ENTRY, "min_tokens": 1024, "write": 4096}
    monkeypatch.setattr(launch, "TABLE", table(tmp_path / "t.json", {"version": 1, "sm_90": [more, ENTRY]}))
    order = Columns.identity(8192)
    assert configure.__wrapped__(90, 64, order, 2, "none") == Launch(1024, 2048, 4)
    assert configure.__wrapped__(90, 4096, order, 2, "none") == Launch(1024, 4096, 4)
    assert configure.__wrapped__(90, 63, order, 2, "none") == configure(80, 63, order, 2, "none")
    assert configure.__wrapped__(90, 4096, order, 2, "rms_norm") == configure(80, 4096, order, 2, "rms_norm")
    assert load_table(launch.TABLE)[90][1] == Entry("none", 8192, 4, 64, Launch(1024, 2048, 4))


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"sm_90": []},
        {"version": 2},
        {"version": 1, "hopper": []},
        {"version": 1, "sm_90": {}},
        {"version": 1, "sm_90": [{**ENTRY, "stages": 2}]},
        {"version": 1, "sm_90": [{**ENTRY, "read": "128"}]},
        {"version": 1, "sm_90": [{**ENTRY, "write": True}]},
        {"version": 1, "sm_90": [{**ENTRY, "write": 96}]},
        {"version": 1, "sm_90": [{**ENTRY, "num_warps": 64}]},
        {"version": 1, "sm_90": [{**ENTRY, "registers": 42}]},
        {"version": 1, "sm_90": [{k: v for k, v in ENTRY.items() if k != "registers"}]},
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InputError):
        load_table(table(tmp_path / "t.json", content))
