"""What is said of published models is what their records say, at each place that says it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, write_text

from slidesparse.cli import main
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.outcome import BY_SIZE
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.offline.published import BEST, COSTS, expected_cost

RECORDS = Path(__file__).parents[2] / "results/accuracy/published"
FILES = {f"Qwen2.5-Coder-{size}B-Instruct": f"qwen2.5-coder-{size}b.jsonl" for size in ("0.5", "1.5")}
FILES["SmolLM2-135M-Instruct"] = "smollm2-135m-h200.jsonl"


@pytest.mark.parametrize("cost", COSTS, ids=lambda one: f"{one[0]} {one[2]}")
def test_the_table_says_what_the_records_say(cost: tuple[str, float, str, str, str]) -> None:
    model, _, pattern, *said = cost
    lines = (RECORDS / FILES[model]).read_text().splitlines()
    found = {one["tag"]: one["code"]["loss"] for one in map(json.loads, lines)}
    longest = next(tag for budget in ("100M", "80M", "20M", "12M") if (tag := f"{pattern} recover {budget}") in found)
    for tag, words in zip((f"{pattern} match", longest), said, strict=True):
        rise = math.exp(sum(found[tag]) / len(found[tag]) - sum(found["dense"]) / len(found["dense"])) - 1
        assert words == f"{rise:.1%}".replace("%", " %")


@pytest.mark.parametrize(("zeros", "pattern"), [(0.01, "6:8"), (0.25, "6:8"), (0.3, "4:6"), (0.5, "2:4"), (1.0, "2:4")])
def test_the_nearest_pattern_is_taken(zeros: float, pattern: str) -> None:
    assert expected_cost(zeros, 0).startswith(f"{pattern} cost ")


def test_help_and_outcome_say_what_loses_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main(["prune", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert BEST in told
    assert all(expected_cost(zeros, 10**9) in told for zeros in (1 / 4, 1 / 3, 1 / 2))
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    text = Calibration(str(write_text(tmp_path / "text.txt")), samples=4, length=16)
    sparsegpt = PruneOptions("4:6", "bf16", method="sparsegpt", calibration=text)
    int8 = by_magnitude("4:6", "int8")
    runs = (("m", "s", sparsegpt), ("m", "magnitude", int8), ("s", "rounded", int8))
    said = {name: prune_checkpoint(tmp_path / source, tmp_path / name, how).describe() for source, name, how in runs}
    assert [BY_SIZE in one for one in said.values()] == [False, True, False]
    card = (tmp_path / "rounded/README.md").read_text()
    assert "| method | zeros of the source kept; what was done before: README.source.md |" in card
