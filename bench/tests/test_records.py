from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_records import case, record

from slidesparse.errors import InputError
from slidesparse_bench import records, served_records
from slidesparse_bench.records import Record, open_records, read_records


def changed(**fields: Any) -> str:
    """A good line with some fields replaced."""
    return json.dumps(json.loads(record(case(), "6:8", 12.5).to_line()) | fields)


@pytest.mark.parametrize(
    "made",
    [record(case(), "6:8", 12.5, ideal=4 / 3, n_bytes=1 << 40), record(case(), "6:8", None, why_not="no such kernel")],
)
def test_a_record_survives_its_line(made: Record) -> None:
    line = made.to_line()
    assert "\n" not in line
    assert Record.from_line(line) == made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "record cannot be read"),
        ("[]", "format of a benchmark record; got 'list'"),
        (changed(format=2), "got 2; needed 1"),
        (changed(tried=[{"name": "a", "median_us": "1", "why_not": None}]), "record.tried[0].median_us; got '1'"),
        (changed(why_not="both"), "either a time or a reason"),
    ],
)
def test_what_is_no_record_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        Record.from_line(line)
    assert words in str(caught.value)


def nested(path: str, value: Any) -> str:
    """A good line with one value of an object inside replaced: ``timing.median_us``."""
    data = json.loads(changed())
    *outer, name = path.split(".")
    inner = data
    for key in outer:
        inner = inner[key]
    assert name in inner
    inner[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("timing.median_us", 0),
        ("timing.median_us", float("nan")),
        ("case.dtype", "int3"),
        ("case.benchmark", "nothing"),
        ("case.tokens", -64),
        ("ideal_speedup", 0),
    ],
)
def test_what_nobody_can_have_measured_is_refused(tmp_path: Path, path: str, value: Any) -> None:
    (tmp_path / "r.jsonl").write_text(changed() + "\n" + nested(path, value) + "\n")
    with pytest.raises(InputError, match=r"r\.jsonl, line 2: record"):
        read_records([tmp_path / "r.jsonl"])


def test_numbers_that_json_has_not_are_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record(case(), "6:8", float("nan")).to_line()


def test_compressed_records_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    one = record(case(), "6:8", 1.5)
    with open_records(path, "x") as file:
        file.write(one.to_line() + "\n")
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert read_records([path]) == [one]
    whole = path.read_bytes()
    for damaged in (whole[:-9], b"no gzip at all", whole[:10] + b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_records([path])


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST", 1000)
    monkeypatch.setattr(served_records, "LARGEST", 1000)
    with open_records(tmp_path / "r.jsonl.gz", "x") as file:
        file.write(" " * 10_000_000)
    assert served_records.benchmark_of(tmp_path / "r.jsonl.gz") is None
    with pytest.raises(InputError):
        read_records([tmp_path / "r.jsonl.gz"])
