"""Revisions of the two models of ``recover``: each has its own option, and the base never silently another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from small_hub import SmallHub, small_hub, use

from slidesparse.cli import main


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SmallHub]:
    with small_hub() as running:
        use(monkeypatch, running, tmp_path / "home")
        make_checkpoint(tmp_path / "m", num_hidden_layers=1)
        running.models["maker/small"] = tmp_path / "m"
        monkeypatch.chdir(tmp_path)
        yield running


def refused(capsys: pytest.CaptureFixture[str], dense: str, *more: str) -> str:
    capsys.readouterr()
    words = ["recover", "maker/small", "out", "--dense", dense, "--tokens", "1M", "--text", "t.txt", "--json"]
    assert main([*words, *more]) == 1
    return str(json.loads(capsys.readouterr().out)["error"]["message"])


def test_the_base_never_takes_another_revision_silently(hub: SmallHub, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "maker/small", "--revision", "v1")
    assert (
        "got --revision v1, which is the pruned model's; needed the revision of --dense as well; add --dense-revision"
        in said
    )
    assert hub.asked == []


def test_each_model_is_fetched_at_its_own_revision(hub: SmallHub, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--revision", "v1", "--dense-revision", "main")
    assert "is not pruned" in refused(capsys, "maker/small", *both)  # so both were fetched
    assert "has no such revision; got v9" in refused(capsys, "maker/small", "--dense-revision", "v9")
    assert "m is a local folder; got revision v1" in refused(capsys, "m", "--dense-revision", "v1")
    assert "has no such revision; got v9" in refused(capsys, "m", "--revision", "v9")
