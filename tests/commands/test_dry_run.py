"""``slidesparse prune --dry-run``: what it says is what the run does, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import build_meta_model
from slidesparse.checkpoints.tokenizer_files import NO_TOKENIZER
from slidesparse.errors import CheckpointError
from slidesparse.files.write_errors import locked
from slidesparse.offline import execute
from slidesparse.offline.dry_run import DryRun, dry_run
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_it_says_what_the_run_does(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    (tmp_path / "m/pytorch_model.bin").write_text("other weights")
    options = by_magnitude("6:8", dtype, layers={"re:.*down_proj": "4:6"}, ignore=("re:.*o_proj",))
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


@pytest.mark.parametrize("file", [None, "spiece.model", "inside/tokenizer.json"])
def test_a_source_without_a_tokenizer(file: str | None, tmp_path: Path) -> None:
    """It can be pruned, and nobody could give the result a text."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "m/tokenizer.json").unlink()
    if file is not None:
        (tmp_path / "m" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "m" / file).write_text('{"made": "for the test"}')
    is_there = file is not None and "/" not in file
    options = by_magnitude("6:8", "int8")
    for told in (dry_run, prune_checkpoint):
        found = told(tmp_path / "m", tmp_path / "q", options)
        assert found.lacks_tokenizer == (not is_there)
        lines = [line for line in found.describe().splitlines() if "tokenizer" in line]
        assert lines == ([] if is_there else [NO_TOKENIZER])
    assert {path.name for path in (tmp_path / "q").iterdir()} >= {"config.json", "model.safetensors"}


def test_a_disk_that_is_too_small_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)

    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    said: DryRun = dry_run(tmp_path / "m", tmp_path / "q", by_magnitude("6:8", "int8"))
    assert not said.fits
    assert f"in {tmp_path / 'q'}, 1 kB free" in said.describe()
    with pytest.raises(CheckpointError, match="not enough space") as refused:
        prune_checkpoint(tmp_path / "m", tmp_path / "q", by_magnitude("6:8", "int8"))
    assert f"would be REFUSED: {refused.value}" in said.describe().splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["file/a/q", "n" * 250])
def test_a_destination_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "file").write_text("no folder")
    for run in (dry_run, prune_checkpoint):
        with pytest.raises(CheckpointError, match=r"destination .* cannot be made"):
            run(tmp_path / "m", tmp_path / name, by_magnitude("6:8", "int8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m"]


INT8 = by_magnitude("6:8", "int8")


def listed(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in [folder, *sorted(folder.rglob("*"))]}


def left_by_another_run(partial: Path) -> None:
    """Of other options, with a finished shard."""
    (partial / "finished").mkdir(parents=True)
    (partial / "output").mkdir()
    (partial / "finished/x.json").write_text("{}")
    (partial / "plan.json").write_text("{}")


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "left by another run": ("q", left_by_another_run, "unfinished output of another run"),
    "written by another run": ("q", lambda partial: partial.mkdir(), "another run is writing"),
    "is there": ("q", lambda partial: (partial.parent / "q").mkdir(), "q exists"),
    "in the source": ("m/q", str, "is the source or lies inside it"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_it_refuses_what_the_run_refuses(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    destination, arrange, words = REFUSED[name]
    arrange(tmp_path / "q.partial")
    before, said = listed(tmp_path), []
    with locked(tmp_path / "q.partial", "writing") if name.startswith("written") else nullcontext():
        for run in (dry_run, prune_checkpoint):
            with pytest.raises(CheckpointError, match=words) as refused:
                run(tmp_path / "m", tmp_path / destination, INT8)
            said.append(str(refused.value))
            assert run is prune_checkpoint or listed(tmp_path) == before
    assert said[0] == said[1]


def test_a_run_that_would_go_on_needs_only_the_rest_of_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    write = execute.write_shard

    def killed(path: Path, *rest: Any) -> dict[str, str]:
        if list(path.parent.glob("*.safetensors")):
            raise KeyboardInterrupt
        return write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoint(tmp_path / "m", tmp_path / "q", INT8)
    before = listed(tmp_path)
    (finished,) = (tmp_path / "q.partial/output").iterdir()
    rest = dry_run(tmp_path / "m", tmp_path / "q", INT8).destination_bytes - finished.stat().st_size
    usage = shutil.disk_usage(tmp_path)
    for free in (rest, rest - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert dry_run(tmp_path / "m", tmp_path / "q", INT8).fits == (free == rest)
    assert listed(tmp_path) == before


def test_the_time_of_calibration_is_estimated(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    said = dry_run(tmp_path / "m", tmp_path / "q", PruneOptions("6:8"))
    assert said.seconds is not None
    assert 0 < said.seconds < 600
    assert "of Python's standard library: less than a minute" in said.describe()
    assert dry_run(tmp_path / "m", tmp_path / "q", by_magnitude("6:8")).seconds is None


def test_columns_that_are_rounded_take_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column takes as long to round as to sweep, once for all linears that read one input."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    monkeypatch.setattr("slidesparse.offline.estimate.operations_a_second", lambda _: 1e30)
    monkeypatch.setattr("slidesparse.offline.estimate.column_seconds", lambda _: 1.0)
    config = build_meta_model(Checkpoint(tmp_path / "m")).model.config
    columns = 3 * config.hidden_size + config.intermediate_size  # q, k and v; o; gate and up; down
    for pattern, rounding, times in (("6:8", "absmax", 1), ("6:8", "6bit", 2), ("dense", "6bit", 1)):
        said = dry_run(tmp_path / "m", tmp_path / "q", PruneOptions(pattern, rounding=rounding))
        assert said.seconds == pytest.approx(times * columns)
