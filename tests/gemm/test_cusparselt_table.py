"""The search for cuSPARSELt's fastest algorithms, and the file of its results."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt import api, plan, table, tune
from slidesparse.gemm.cusparselt.table import (
    Algorithm,
    AlgorithmRecord,
    Key,
    add_record,
    load_algorithms,
    nearest_record,
    table_path,
)
from slidesparse.gemm.cusparselt.tune import candidates

KEY = Key("NVIDIA H200", "0.8.0", 4608, 5376, "int8")
RECORD = AlgorithmRecord(*KEY, 1024, Algorithm(7, -1), 21.5, 24.0)


def test_records_come_back_and_replace_older_ones(tmp_path: Path) -> None:
    path, other = tmp_path / "a" / "b.json", replace(RECORD, rows=2048, algorithm=None)
    assert load_algorithms(path) == ()
    newer = replace(RECORD, algorithm=Algorithm(3), time_us=20.0)
    for record in (RECORD, other, newer):
        add_record(path, record)
    assert load_algorithms(path) == (other, newer)
    assert sorted(file.name for file in path.parent.iterdir()) == ["b.json", "b.lock"]


def test_two_searches_at_once_keep_the_records_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "table.json", replace(RECORD, rows=2048)
    write, second = table.replace_file, threading.Thread(target=add_record, args=(path, other))

    def meanwhile(*arguments: Any) -> None:
        if not second.ident:
            second.start()
            second.join(0.5)  # it ends here if nothing holds it up
        write(*arguments)

    monkeypatch.setattr(table, "replace_file", meanwhile)
    add_record(path, RECORD)
    second.join()
    assert set(load_algorithms(path)) == {RECORD, other}


def test_the_nearest_record_of_the_same_problem_counts() -> None:
    table = (RECORD, replace(RECORD, rows=2048, algorithm=Algorithm(8)))
    for rows, best in ((1024, 7), (1088, 7), (512, 7), (1900, 8), (4096, 8), (496, None), (4224, None)):
        found = nearest_record(table, KEY, rows)
        assert (None if found is None or found.algorithm is None else found.algorithm.id) == best
    same: dict[str, Any] = {"gpu": "NVIDIA H100", "library": "0.8.1", "out": 4640, "columns": 32, "dtype": "fp8"}
    for name, value in same.items():
        assert nearest_record(table, KEY._replace(**{name: value}), 1024) is None


@pytest.mark.parametrize(
    "damage", [('"version": 2', '"version": 1'), ('"rows": 1024', '"rows": 0'), ('"id": 7', '"id": "7"'), ("{", "")]
)
def test_a_damaged_file_is_one_line_in_the_log_and_the_default_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: tuple[str, str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan, "MatmulPlan", lambda shape, algorithm: algorithm)
    monkeypatch.setattr(plan.Shape, "key", KEY)
    log_once.cache_clear()
    shapes = [plan.Shape(0, 4608, 5376, rows, torch.int8) for rows in (1024, 1040)]
    add_record(table_path(), RECORD)
    table_path().write_text(table_path().read_text().replace(*damage))
    load_algorithms.cache_clear()
    assert [plan.plan_for.__wrapped__(shape) for shape in shapes] == [None, None]
    (line,) = caplog.messages
    assert "these search results are not used: damaged" in line
    assert "\n" not in line
    add_record(table_path(), RECORD)
    assert [plan.plan_for.__wrapped__(shape) for shape in shapes] == [RECORD.algorithm] * 2


def test_candidates_are_all_that_the_gpu_accepts() -> None:
    hopper = list(candidates(3, (9, 0), 4608))
    assert hopper == [Algorithm(i, split_k) for i in range(3) for split_k in (1, -1)]
    assert {c.split_k for c in candidates(3, (9, 0), 384)} == {1}
    ampere = list(candidates(2, (8, 0), 384))
    assert len(ampere) == len(set(ampere)) == 2 * 7
    assert {c.split_k_mode for c in ampere if c.split_k > 1} == {api.ONE_KERNEL, api.TWO_KERNELS}


def test_a_search_times_the_algorithms_that_run_and_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plan:
        algorithms = 2

        def __init__(self, shape: plan.Shape, algorithm: Algorithm | None) -> None:
            if algorithm == Algorithm(1):
                raise UnsupportedError("a plan", got="no kernel")
            self.algorithm = algorithm

    class Bench:
        operands = (None,)

        def __init__(self, shape: plan.Shape) -> None:
            self.run = print

        def product(self, made: Plan) -> torch.Tensor:
            return torch.full((1,), int(made.algorithm == Algorithm(1, -1)), dtype=torch.int32)

    monkeypatch.setattr(tune, "MatmulPlan", Plan)
    monkeypatch.setattr(tune, "_Bench", Bench)
    monkeypatch.setattr(tune, "time_candidates", lambda ways, _: {name: 9.0 - i for i, (name, _) in enumerate(ways)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(plan.Shape, "key", KEY)
    record = tune._search(plan.Shape(0, 4608, 5376, 1024, torch.int8))
    assert record == AlgorithmRecord(*KEY, 1024, Algorithm(0, -1), 7.0, 9.0)
