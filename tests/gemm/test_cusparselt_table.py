from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slidesparse import InputError
from slidesparse.base import file_lock
from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt import api, plan, table, tune
from slidesparse.gemm.cusparselt.table import (
    Algorithm,
    AlgorithmRecord,
    Key,
    Trial,
    add_records,
    load_algorithms,
    nearest_record,
    table_path,
)
from slidesparse.gemm.cusparselt.tune import candidates

KEY = Key("NVIDIA H200", "0.8.0", 4608, 5376, "int8", "int32")
TRIALS = (Trial(0, 1, 0, 24.0, None), Trial(7, -1, 0, 21.5, None), Trial(9, 1, 0, None, "wrong product"))
RECORD = AlgorithmRecord(*KEY, 1024, Algorithm(7, -1), 21.5, 24.0, TRIALS)


def test_records_come_back_and_replace_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert load_algorithms(path) == ()
    other = replace(RECORD, rows=2048, algorithm=None)
    add_records(path, [RECORD, other])
    assert load_algorithms(path) == (RECORD, other)
    newer = replace(RECORD, algorithm=Algorithm(3), time_us=20.0)
    add_records(path, [newer])
    assert sorted(load_algorithms(path), key=lambda record: record.rows) == [newer, other]
    assert sorted(file.name for file in path.parent.iterdir()) == ["b.json", "b.lock"]


def test_two_searches_at_once_keep_the_records_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "table.json", replace(RECORD, rows=2048)
    write, second = table.replace_file, threading.Thread(target=add_records, args=(path, [other]))

    def meanwhile(*arguments: Any) -> None:
        if not second.ident:
            second.start()
            second.join(0.5)  # it ends here if nothing holds it up
        write(*arguments)

    monkeypatch.setattr(table, "replace_file", meanwhile)
    add_records(path, [RECORD])
    second.join()
    assert set(load_algorithms(path)) == {RECORD, other}


def test_a_lock_that_is_not_given_back_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LOCK_S", 0.1)
    with (
        file_lock.file_lock(tmp_path / "table.lock", 0),
        pytest.raises(UnsupportedError, match=r"table.json is in use"),
    ):
        add_records(tmp_path / "table.json", [RECORD])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    add_records(path, [RECORD])
    before = path.read_bytes()

    def broken(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space left"):
        add_records(path, [replace(RECORD, rows=2048)])
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "table.lock"]


def test_the_nearest_record_of_the_same_problem_counts() -> None:
    table = (RECORD, replace(RECORD, rows=2048, algorithm=Algorithm(8)))
    for rows, best in ((1024, 7), (1088, 7), (512, 7), (1900, 8), (4096, 8), (496, None), (4224, None)):
        found = nearest_record(table, KEY, rows)
        assert (None if found is None or found.algorithm is None else found.algorithm.id) == best
    same: dict[str, Any] = {"gpu": "NVIDIA H100", "library": "0.8.1", "out": 4640, "columns": 32, "dtype": "fp8"}
    for name, value in {**same, "accumulator": "x"}.items():
        assert nearest_record(table, KEY._replace(**{name: value}), 1024) is None


def _break(content: dict[str, Any], where: str, value: object) -> None:
    *path, last = where.split(".")
    for step in path:
        content = content[int(step) if step.isdecimal() else step]
    if value == "absent":
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("version", 2),
        ("records.0.gpu", 5),
        ("records.0.rows", 0),
        ("records.0.time_us", -1.0),
        ("records.0.default_us", float("nan")),
        ("records.0.tried.0.time_us", 0.0),
        ("records.0.algorithm.split_k", "absent"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, where: str, value: object) -> None:
    path = tmp_path / "table.json"
    add_records(path, [RECORD])
    content = json.loads(path.read_text())
    _break(content, where, value)
    path.write_text(json.dumps(content))
    load_algorithms.cache_clear()
    with pytest.raises(InputError, match=r"damaged search results in .*table\.json.*delete the file") as error:
        load_algorithms(path)
    assert str(error.value).count("; got ") <= 1


@pytest.mark.parametrize("text", ["", "[]"])
def test_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError):
        load_algorithms(path)


def test_a_damaged_file_is_one_line_in_the_log_and_the_default_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan, "MatmulPlan", lambda shape, algorithm: algorithm)
    monkeypatch.setattr(plan.Shape, "key", KEY)
    log_once.cache_clear()
    shapes = [plan.Shape(0, 4608, 5376, rows, torch.int8, torch.int32) for rows in (1024, 1040)]
    table_path().write_text('{"version": 2, "records": []}')
    assert [plan.plan_for.__wrapped__(shape) for shape in shapes] == [None, None]
    (line,) = caplog.messages
    assert "these search results are not used: damaged" in line
    add_records(table_path(), [RECORD])
    assert [plan.plan_for.__wrapped__(shape) for shape in shapes] == [RECORD.algorithm] * 2


def test_candidates_are_all_that_the_gpu_accepts() -> None:
    hopper = list(candidates(3, (9, 0), 4608))
    assert hopper == [Algorithm(i, split_k) for i in range(3) for split_k in (1, -1)]
    assert {c.split_k for c in candidates(3, (9, 0), 384)} == {1}
    ampere = list(candidates(2, (8, 0), 384))
    assert len(ampere) == len(set(ampere)) == 2 * 7
    assert {c.split_k_mode for c in ampere if c.split_k > 1} == {api.ONE_KERNEL, api.TWO_KERNELS}


def test_a_search_records_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
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
    record = tune._search(plan.Shape(0, 4608, 5376, 1024, torch.int8, torch.int32))
    faults = (Trial(1, 1, 0, None, "no kernel"), Trial(1, -1, 0, None, "wrong product"))
    tried = (Trial(0, 1, 0, 8.0, None), Trial(0, -1, 0, 7.0, None), *faults)
    assert record == AlgorithmRecord(*KEY, 1024, Algorithm(0, -1), 7.0, 9.0, tried)
