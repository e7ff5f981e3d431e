"""The report of served loads, from records made up."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slidesparse.cli import main
from slidesparse.errors import InputError
from slidesparse_bench.records import Machine
from slidesparse_bench.report.serve import group_tables, load_table, write_serve_report
from slidesparse_bench.report.serve_numbers import groups, steps, tokens_a_joule
from slidesparse_bench.report.serve_soak import soak_lines
from slidesparse_bench.serve.serve_load import BURST, LOADS, MIXED, soak
from slidesparse_bench.served_figures import Growth, Latency, Power, Soak, Steady, Waits
from slidesparse_bench.served_records import (
    STOCK,
    EngineKey,
    ServeRecord,
    Workload,
    read,
    to_line,
)

RESULTS = Path(__file__).parents[2] / "results/h200"
MACHINE = Machine("Pretend", "9.0", None, 1.0, 1.0, "2", None, None, None, "0.22.1", "0", None)
SECONDS = {"stock": 12.0, "control": 11.0, "6:8": 10.0, "2:4": 12.5, "stock again": 12.6}
BACKENDS = {"stock": "", "control": "dense", "stock again": ""}


def record(engine: str, workload: Workload, share: float = 1.0) -> ServeRecord:
    pattern = engine if ":" in engine else "dense"
    key = EngineKey("Qwen2.5-7B", "int8", 28, 1, engine, pattern, BACKENDS.get(engine, "auto"), None)
    seconds = SECONDS[engine] * share
    return ServeRecord(
        key,
        workload,
        MACHINE,
        "2026-11-22T00:00:00+00:00",
        seconds=(seconds, seconds, seconds * 1.5),
        prompt_tokens=5000,
        output_tokens=1000,
        wall_s=3 * seconds,
        first=Latency(10.0, 20.0),
        between=Latency(1.0, 2.0),
        step_tokens=(492, 16384, 700, 900, 256),
        step_us=(0, 200000, 10000, 20000, 7000),
        power=Power(1000.0, 690.0, 1500.0, 60.0, 0.95, 120.0),
        steady=Steady(8.0, 0.9) if workload is MIXED else None,
    )


RECORDS = [
    record(engine, workload, share)
    for engine in SECONDS
    for workload, share in ((BURST, 0.01), (MIXED, 1.0), (LOADS[0], 2.0))
]


def test_gains_are_told_over_both_stock_engines_and_the_control() -> None:
    (group,) = groups(RECORDS)
    assert group.engines == ["stock", "control", "6:8", "2:4", "stock again"]
    assert group.over("stock", "6:8", "mixed") == pytest.approx(1.2)
    assert group.over("stock again", "6:8", "mixed") == pytest.approx(1.26)
    assert group.over("control", "6:8", "mixed") == pytest.approx(1.1)
    speed = group_tables(group)[0].markdown()
    assert "| mixed | 6:8 | 3 | 10000.00 | 10000.00 | 15000.00 | 1.200 | 1.260 | 1.100 |" in speed
    assert "| mixed | stock again | 3 | 12600.00 | 12600.00 | 18900.00 | 0.952 | 1.000 | 0.873 |" in speed


def test_tokens_a_joule_count_all_repeats() -> None:
    assert tokens_a_joule(RECORDS[0]) == pytest.approx(3 * 6000 / 1000)
    assert tokens_a_joule(replace(RECORDS[0], power=None)) is None


def test_servers_and_drafts_have_tables_of_their_own(tmp_path: Path) -> None:
    of_sglang = replace(MACHINE, vllm=None)
    others = [replace(one, machine=of_sglang, server="sglang 0.5.17", speculation="EAGLE-3") for one in RECORDS]
    assert [(group.name, group.slug) for group in groups([*RECORDS, *others])] == [
        ("Qwen2.5-7B, INT8, 28 layers", "qwen2_5-7b_int8_28_1"),
        ("Qwen2.5-7B, INT8, 28 layers, SGLang 0.5.17, EAGLE-3", "qwen2_5-7b_int8_28_1_sglang_0_5_17_eagle-3"),
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(f"{to_line(one)}\n" for one in others))
    assert read([path]) == others
    assert len(write_serve_report([*RECORDS, *others], tmp_path)) > len(write_serve_report(RECORDS, tmp_path))


def test_steps_are_counted_by_their_tokens() -> None:
    found = steps(RECORDS[0])  # the first has no time
    assert [(one.most, one.steps, one.median_ms) for one in found] == [
        (256, 1, 7.0),
        (1024, 2, 15.0),
        (16384, 1, 200.0),
    ]
    assert sum(one.share for one in found) == pytest.approx(1)


def test_a_report_holds_all_of_it(tmp_path: Path) -> None:
    died = replace(record("2:4", MIXED), why_not="no memory", workload=None)
    files = write_serve_report([*RECORDS, died], tmp_path)
    assert {file.suffix for file in files} == {".md", ".png", ".csv"}
    assert all(file.stat().st_size for file in files)
    page = files[0].read_text()
    assert "| 6:8 | mixed | 100.00 | 100 | 18.00 | 690 | 1500 | 95% | 90% | 10.0 | 20.0 | 1.0 | 2.0 | 0 |" in page
    assert "| Qwen2.5-7B int8 2:4 | start | no memory |" in page
    assert "serve_waits_qwen2_5-7b_int8_28_1.png" in page
    assert "serve_speed_qwen2_5-7b_int8_28_1.png" in page


def test_the_command_line_tells_files_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = tmp_path / "serve.jsonl"
    serve.write_text("".join(to_line(found) + "\n" for found in RECORDS))
    assert main(["report", str(serve), "--out", str(tmp_path / "out")]) == 0
    assert "serve.md" in capsys.readouterr().out
    serve.write_text(serve.read_text().replace('"lost":0', '"lost":"none"'))
    layers = str(RESULTS / "grouped.jsonl")
    for files in ([str(serve)], [layers, str(serve)]):
        assert main(["report", *files, "--out", str(tmp_path / "new")]) == 1
        assert "lost" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()  # of two pages neither is written


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": ()},
        {"seconds": (0.5, -1.0)},
        {"seconds": (float("nan"),)},
        {"power": Power(0.0, 500.0, 1500.0, 50.0, 1.0, 100.0)},
        {"first": Latency(-1.0, 2.0)},
        {"workload": replace(BURST, prompt=())},
        {"lost": -1},
        {"steady": Steady(-1.0, None)},
        {"soak": Soak(5, 5, 1, (None, None, None), None, None, ())},
        {"soak": Soak(5, 5, 0, (None, None, None), Growth(-1.0, 0.0, 0.0), None, ())},
    ],
    ids=str,
)
def test_what_nobody_can_have_measured_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    line = json.dumps(dataclasses.asdict(replace(record(STOCK, BURST), **wrong)))
    (tmp_path / "r.jsonl").write_text(to_line(record(STOCK, BURST)) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"r\.jsonl, line 2: (a )?record"):
        read([tmp_path / "r.jsonl"])


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"gpu": "Other"}, "got Other, Pretend; needed records of one GPU"),
        ({"vllm": "0.33.0"}, r"got 0\.22\.1, 0\.33\.0; needed records of one release of vLLM"),
    ],
)
def test_records_that_must_not_be_divided_by_one_another_are_refused(
    tmp_path: Path, there: dict[str, str], words: str
) -> None:
    other = replace(RECORDS[5], machine=replace(MACHINE, **there))
    with pytest.raises(InputError, match=words):
        write_serve_report([RECORDS[0], other], tmp_path)


WAITS = Waits(Latency(100.0, 200.0), Latency(10.0, 20.0))
SOAKED = Soak(5000, 5000, 0, (WAITS, WAITS, WAITS), Growth(1000.0, 1000.0, 0.0), Growth(2000.0, 2010.5, 1.25), ())


def test_a_soak_is_one_line(tmp_path: Path) -> None:
    passed = replace(record("6:8", soak(360.0)), soak=SOAKED, wall_s=360.0, http=True)
    failed = replace(record("2:4", soak(360.0)), soak=replace(SOAKED, whole=4999, gpu=None, faults=("a fault",)))
    (line, other) = soak_lines([record("stock", MIXED), passed, failed])
    for words in ("over HTTP, **passed**. 5000 of 5000", "100.0/200.0, 100.0", "2000 to 2010 MB (+1.2 MB a minute)"):
        assert words in line
    assert "in process, **failed**: a fault. 4999 of 5000" in other
    assert "GPU memory not known" in other
    path = tmp_path / "r.jsonl"
    path.write_text(to_line(passed) + "\n")
    assert read([path]) == [passed]
    page = write_serve_report([passed, record("6:8", MIXED)], tmp_path / "out")[0].read_text()
    assert line in page
    assert "## Qwen2.5-7B, INT8, 28 layers, over HTTP: loads" in page  # apart from what was asked in process
    assert "## Qwen2.5-7B, INT8, 28 layers: loads" in page


def test_a_soak_served_all_that_came_and_not_each_of_its_lengths_once() -> None:
    soaked = replace(record("6:8", soak(360.0)), soak=SOAKED, seconds=(250.0,))
    (group,) = groups([soaked])
    rows = load_table(group).rows
    assert [row[:3] for row in rows] == [("6:8", "arrivals, soak", 5000 / 250.0)]


def test_records_without_later_fields_are_read(tmp_path: Path) -> None:
    path, data = tmp_path / "r.jsonl", dataclasses.asdict(RECORDS[0])
    for name in ("steady", "error", "http", "soak"):
        del data[name]
    path.write_text(json.dumps(data) + "\n")
    assert read([path]) == [RECORDS[0]]
