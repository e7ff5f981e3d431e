"""JSON that somebody else wrote, by mistake or to do harm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from slidesparse.base.typed_json import MAX_DEPTH, decode, load_json, parse_json
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.json_files import read_json
from slidesparse.gemm.speed_files import load_speeds
from slidesparse_bench.records import Record

HOSTILE = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 70 + b"1" + b"}" * 70,
    "long number": b"1" * 5000,
    "beyond 64 bits": b"123456789012345678901",
    "half a surrogate pair": b'{"a": ["\\ud800"]}',
    "half a surrogate pair as key": b'{"\\udc00": 1}',
    "not UTF-8": b'{"a": "\xff"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "empty": b"",
    "half": b'{"a": [1, 2',
}


def _one_line(error: pytest.ExceptionInfo[BaseException], name: str) -> None:
    assert "\n" not in str(error.value)
    assert name in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_json(path, non_finite=True)
    _one_line(error, "hostile.json")
    with pytest.raises(CheckpointError) as refused:
        read_json(path)
    _one_line(refused, "hostile.json")
    with pytest.raises(InputError, match="delete") as error:
        load_speeds(path)
    _one_line(error, "hostile.json")


@pytest.mark.parametrize("content", ["NaN", "Infinity", "[-Infinity]"])
def test_numbers_that_json_has_not(content: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the number") as error:
        parse_json(content, "x.json")
    _one_line(error, "x.json")
    path = tmp_path / "config.json"  # what transformers writes for Mamba 2
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json(path) == {"time_step_limit": [0.0, float("inf")]}


def test_what_is_allowed_stays_allowed() -> None:
    value = {"a": [1, -2.5, True, None, 2**64 - 1, -(2**63), 1e300], "ü😀": "\u2028\x00", "": {}}
    assert parse_json(json.dumps(value), "x") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), "x") == value
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deep, "x")) == deep


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        load_json(tmp_path)
    with pytest.raises(InputError, match="record cannot be read"):
        Record.from_line("[" * 100_000)


@dataclass(frozen=True)
class Shape:
    name: str
    sides: tuple[int, ...]
    angle: float | None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "shape; got []; needed an object"),
        (
            {"name": "a", "sides": [1], "angle": None, "colour": 1},
            "unknown fields of shape; got ['colour']; needed none",
        ),
        ({"name": "a", "sides": [1]}, "shape lacks angle; got ['name', 'sides']; needed all of name, sides, angle"),
        ({"name": "a", "sides": [1, "2"], "angle": 1}, "shape.sides[1]; got '2'; needed int"),
        ({"name": 3, "sides": [], "angle": 1}, "shape.name; got 3; needed str"),
        ({"name": "a", "sides": "x" * 9999, "angle": 1}, "xxx...; needed a list"),
    ],
)
def test_a_field_that_does_not_fit_is_named(value: object, words: str) -> None:
    with pytest.raises(InputError) as error:
        decode(Shape, value, "shape")
    assert words in str(error.value)
    _one_line(error, "shape")
