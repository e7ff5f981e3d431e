"""Options that change nothing or contradict each other: one line says so, before any file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slidesparse.cli import main

PRUNE = ["prune", "MISSING", "s", "--pattern", "6:8", "--method", "magnitude"]
TEXT = ["--calibration", "MISSING.txt"]
WANDA = [*PRUNE, "--method", "wanda", *TEXT]
IDLE = "magnitude takes no calibration text; got {}"

REFUSED: dict[str, tuple[list[str], str]] = {
    "windows of no text": ([*PRUNE, "--seed", "0", "--samples", "64"], IDLE.format("--samples, --seed")),
    "windows of no text without BOS": ([*PRUNE, "--no-bos", "--dry-run"], IDLE.format("--no-bos")),
    "text for magnitude": ([*PRUNE, *TEXT], "magnitude takes no calibration text; got MISSING.txt"),
    "matching without text": ([*PRUNE, "--match-steps", "9"], "matching needs calibration text"),
    "negative matching": ([*WANDA, "--match-steps", "-3"], "steps of matching; got -3"),
    "smoothing floats": ([*WANDA, "--smooth", "--dtype", "bf16"], "smoothing helps rounding to 8 bits; got --dtype bf"),
    "ternary in FP8": (
        [*PRUNE, "--rounding", "ternary", "--dtype", "fp8"],
        "the ternary rounding ends in INT8 storage",
    ),
    "six bits in FP8": ([*PRUNE, "--rounding", "6bit", "--dtype", "fp8"], "the 6bit rounding ends in INT8 storage"),
    "six bits of nothing": (
        [*PRUNE, "--rounding", "6bit", "--pattern", "dense", "--layer", "re:.*down_proj=dense"],
        "options without effect; got --rounding 6bit without a pattern",
    ),
    "matching of nothing": (
        [*WANDA, "--pattern", "dense", "--match-steps", "9"],
        "options without effect; got --match-steps without a pattern",
    ),
    "a method for nothing": (
        [*WANDA, "--pattern", "dense", "--dtype", "bf16"],
        "options without effect; got --method wanda without a pattern",
    ),
    "ternary and wanda": ([*WANDA, "--rounding", "ternary"], "the ternary rounding cannot be calibrated; got wanda"),
    "no pattern": ([*PRUNE, "--pattern", "6_8"], "not a pattern; got '6_8'"),
    "no pattern of a layer": ([*PRUNE, "--layer", "re:.*=6_8"], "not a pattern; got '6_8'"),
    "no type": ([*PRUNE, "--dtype", "int4"], "unknown weight type; got 'int4'"),
    "no samples": ([*WANDA, "--samples", "0"], "calibration windows (--samples); got 0"),
    "windows of tasks": (
        ["eval", "MISSING", "--tasks", "arc_easy", "--window", "8", "--stride", "4"],
        "options without effect; got --window, --stride without --text",
    ),
    "tasks without BOS": (
        ["eval", "MISSING", "--tasks", "arc_easy", "--no-bos"],
        "options without effect; got --no-bos without --text",
    ),
    "examples of a text": (
        ["eval", "MISSING", "--text", "MISSING.txt", "--limit", "8"],
        "options without effect; got --limit without --tasks",
    ),
    "a stride past the window": (
        ["eval", "MISSING", "--text", "MISSING.txt", "--window", "8", "--stride", "8"],
        "stride of the windows (--stride); got 8",
    ),
    "no stride": (
        ["eval", "MISSING", "--text", "MISSING.txt", "--stride", "0"],
        "stride of the windows (--stride); got 0",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_options_are_refused_before_any_file_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "MISSING").mkdir()  # of which the hub is not asked
    monkeypatch.chdir(tmp_path)
    words, says = REFUSED[case]
    assert main(words) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"slidesparse: {says}")
    assert told.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["MISSING"]
