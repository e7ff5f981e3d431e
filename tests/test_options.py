"""Options that change nothing or contradict each other: one line says so, before any file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slidesparse.cli import main

PRUNE = ["prune", "MISSING", "s", "--pattern", "6:8", "--method", "magnitude"]
TEXT = ["--calibration", "MISSING.txt"]
WANDA = [*PRUNE, "--method", "wanda", *TEXT]
DENSE = ["--pattern", "dense"]
EVAL, TASKS = ["eval", "MISSING", "--text", "MISSING.txt"], ["eval", "MISSING", "--tasks", "arc_easy"]
IDLE = "options without effect; got"

REFUSED: list[tuple[list[str], str]] = [
    ([*PRUNE, "--seed", "0", "--samples", "128"], "magnitude takes no calibration text; got samples, seed"),
    ([*PRUNE, "--no-bos", "--dry-run"], "magnitude takes no calibration text; got bos"),
    ([*PRUNE, *TEXT], "magnitude takes no calibration text; got MISSING.txt; use --method wanda or sparsegpt"),
    ([*PRUNE, "--match-steps", "9"], "matching needs calibration text"),
    ([*WANDA, "--match-steps", "-3"], "steps of matching; got -3; needed 0 or more"),
    ([*PRUNE, "--rounding", "ternary", "--dtype", "fp8"], "the ternary rounding ends in INT8 storage"),
    ([*PRUNE, "--match-steps", "9", *DENSE], f"{IDLE} --match-steps without a pattern"),
    ([*WANDA, "--dtype", "bf16", *DENSE], f"{IDLE} --method wanda without a pattern"),
    ([*WANDA, "--rounding", "ternary"], "the ternary rounding cannot be calibrated; got wanda"),
    ([*PRUNE, "--layer", "re:.*=6_8"], "not a pattern; got '6_8'"),
    ([*PRUNE, "--dtype", "int4"], "unknown weight type; got 'int4'"),
    ([*WANDA, "--samples", "0"], "calibration windows (--samples); got 0"),
    ([*TASKS, "--window", "8", "--no-bos"], f"{IDLE} --window, --no-bos without --text"),
    ([*EVAL, "--limit", "8"], f"{IDLE} --limit without --tasks"),
    ([*EVAL, "--window", "8", "--stride", "8"], "stride of the windows (--stride); got 8"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_options_are_refused_before_any_file_is_read(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "MISSING").mkdir()  # of which the hub is not asked
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"slidesparse: {says}")
    assert told.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["MISSING"]
