"""Files that libraries cannot read, each in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError
from slidesparse.offline.calibrate.calibration import encode, load_tokenizer


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unreadable") / "m"
    make_checkpoint(folder, num_hidden_layers=1)
    return folder


def test_a_file_that_cannot_be_mapped(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 3 bytes from file: Cannot allocate memory (12)")

    checkpoint = Checkpoint(dense)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    with pytest.raises(CheckpointError, match="unable to mmap"):
        checkpoint.tensor("model.norm.weight")


def test_a_tokenizer_whose_regular_expression_never_ends(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    said["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="the tokenizer cannot read the text; got PanicException"):
        encode(load_tokenizer(tmp_path), "a" * 100 + "!")
