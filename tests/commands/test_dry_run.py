"""``slidesparse prune --dry-run``: what it says is what the run does, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, make_source

from slidesparse.cli import main
from slidesparse.commands import dry_run as dry_running
from slidesparse.commands.dry_run import DryRun, dry_run
from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.errors import CheckpointError
from slidesparse.files.calibration import Calibration
from slidesparse.files.checkpoint import Checkpoint


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_it_says_what_the_run_does(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    (tmp_path / "m/pytorch_model.bin").write_text("other weights")
    options = PruneOptions("6:8", dtype, layers={"re:.*down_proj": "4:6"}, ignore=("re:.*o_proj",))
    said = dry_run(tmp_path / "m", tmp_path / "new/q", options)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    done = prune_checkpoint(tmp_path / "m", tmp_path / "new/q", options)
    assert {pattern: what.count for pattern, what in said.treated.items()} == {"6:8": 10, "4:6": 2}
    assert {reason: what.count for reason, what in said.left.items()} == {
        "output embedding": 1,
        "on the ignore list": 2,
    }
    assert len(done.patterns) == 12
    assert said.not_copied == ["pytorch_model.bin"]
    every = [*said.treated.values(), *said.left.values(), said.others]
    assert sum(what.source_bytes for what in every) == Checkpoint(tmp_path / "m").n_bytes
    assert sum(what.destination_bytes for what in every) == Checkpoint(tmp_path / "new/q").n_bytes
    assert said.destination_bytes == done.destination_bytes + said.files.source_bytes
    assert said.fits
    assert said.time.seconds > 0


def test_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    capsys.readouterr()
    words = ["prune", str(tmp_path / "m"), str(tmp_path / "q"), "--pattern", "6:8", "--dtype", "int8", "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dry run: nothing was written"
    assert lines[1].startswith("would treat 7 linears, ")
    assert lines[2] == "would leave 1 layer, 12.3 kB: output embedding"
    assert " free" in lines[4]
    assert "measured here on " in lines[5]
    assert "reading and writing are not counted" in lines[5]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["treated"]["6:8"]["count"] == 7
    assert found["fits"]
    assert found["time"]["basis"].startswith("measured here on")
    assert not (tmp_path / "q").exists()


def test_calibrated_methods_are_timed_and_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    times = [
        dry_run(source, tmp_path / "q", PruneOptions("6:8", "int8", method, calibration)).time
        for method, calibration in (("magnitude", None), ("wanda", Calibration(str(tmp_path / "text.txt"), 4, 32)))
    ]
    assert "attention is not counted" in times[1].basis
    assert "attention" not in times[0].basis
    words = [str(source), str(tmp_path / "q"), "--pattern", "6:8", "--dtype", "int8", "--dry-run"]
    assert main(["prune", *words, "--method", "wanda", "--calibration", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "text.txt"]


def test_a_disk_that_is_too_small_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)

    class Usage:
        free = 1000

    monkeypatch.setattr(dry_running.shutil, "disk_usage", lambda path: Usage)
    said: DryRun = dry_run(tmp_path / "m", tmp_path / "q", PruneOptions("6:8", "int8"))
    assert not said.fits
    assert f"in {tmp_path / 'q'}, 1.0 kB free" in said.describe()
    assert "NOT ENOUGH SPACE: " in said.describe()


def test_nothing_to_treat(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    said = dry_run(tmp_path / "m", tmp_path / "q", PruneOptions("dense", "int8"))
    assert {pattern: what.count for pattern, what in said.treated.items()} == {"dense": 7}


@pytest.mark.parametrize("name", ["file/q", "file/a/q", "n" * 300, "n" * 250])
def test_a_destination_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "file").write_text("no folder")
    for run in (dry_run, prune_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"destination .* cannot be made; got (Not a directory|File name too)"
        ):
            run(tmp_path / "m", tmp_path / name, PruneOptions("6:8", "int8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m"]
