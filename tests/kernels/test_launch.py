"""The launch rule and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slidesparse.errors import InputError
from slidesparse.kernels import launch
from slidesparse.kernels.columns import Columns
from slidesparse.kernels.launch import Entry, Launch, configure, load_table
from slidesparse.packed import pack

ENTRY = {"first": "none", "columns": 8192, "group": 4, "min_tokens": 64, "tile": 128, "num_warps": 4, "held": True}


def table(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_table_that_ships_can_be_read() -> None:
    assert all(arch >= 80 for arch in load_table(launch.TABLE))


@pytest.mark.parametrize("columns", [4, 640, 8192, 16384, 65536, 600000])
def test_the_rule_gives_a_launch_for_any_size(columns: int) -> None:
    order = Columns.identity(columns)
    for tokens in (1, 4096):
        for first in ("none", "rms_norm"):
            chosen = configure(0, tokens, order, 2, True, first)
            assert 32 * chosen.num_warps == chosen.tile
            words = -(-order.units // chosen.tile) * launch.UNIT_GROUPS * order.group * 2 // 4
            assert chosen.held == (words <= (launch.NORM_WORDS if "norm" in first else launch.HELD_WORDS))


def test_narrow_loads_are_not_unrolled_without_end() -> None:
    order = Columns.of(pack(torch.zeros(1, 8192, dtype=torch.int8), "4:6"))
    assert -(-order.units // configure(0, 4096, order, 2, True, "none").tile) == 3
    assert -(-order.units // configure(0, 4096, order, 2, False, "none").tile) == 1


def test_few_tokens_get_more_lanes_each_and_many_leave_fewer_idle() -> None:
    order = Columns.of(pack(torch.zeros(1, 8192, dtype=torch.int8), "4:6"))
    assert order.units == 342
    assert configure(0, 1, order, 2, True, "none") == Launch(512, 16)
    assert configure(0, 4096, order, 2, True, "none") == Launch(128, 4)


def test_a_measured_launch_beats_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**ENTRY, "min_tokens": 1024, "tile": 512}
    monkeypatch.setattr(launch, "TABLE", table(tmp_path / "t.json", {"version": 1, "sm_90": [more, ENTRY]}))
    order = Columns.identity(8192)
    assert configure.__wrapped__(90, 64, order, 2, True, "none") == Launch(128, 4)
    assert configure.__wrapped__(90, 4096, order, 2, True, "none") == Launch(512, 4)
    assert configure.__wrapped__(90, 63, order, 2, True, "none") == configure(80, 63, order, 2, True, "none")
    assert configure.__wrapped__(90, 4096, order, 2, True, "rms_norm") == configure(
        80, 4096, order, 2, True, "rms_norm"
    )
    assert load_table(launch.TABLE)[90][1] == Entry("none", 8192, 4, 64, Launch(128, 4))


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"sm_90": []},
        {"version": 2},
        {"version": 1, "hopper": []},
        {"version": 1, "sm_90": {}},
        {"version": 1, "sm_90": [{**ENTRY, "stages": 2}]},
        {"version": 1, "sm_90": [{**ENTRY, "tile": "128"}]},
        {"version": 1, "sm_90": [{**ENTRY, "held": 1}]},
        {"version": 1, "sm_90": [{**ENTRY, "tile": True}]},
        {"version": 1, "sm_90": [{**ENTRY, "tile": 96}]},
        {"version": 1, "sm_90": [{**ENTRY, "num_warps": 64}]},
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InputError):
        load_table(table(tmp_path / "t.json", content))
