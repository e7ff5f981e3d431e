"""``slidesparse.load`` measures before its layers choose, where that decides something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

import slidesparse
from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.errors import InputError
from slidesparse.gemm import Problem
from slidesparse.tuning.at_load import LoadTuner


def test_each_layer_is_offered_for_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[Problem] = []
    measured: list[Any] = []

    def wants(self: LoadTuner, problem: Problem, backend: str, fallback: str) -> bool:
        assert (self.source, backend, fallback) == (torch.bfloat16, "auto", "none")
        offered.append(problem)
        return problem.out_features == 152  # gate and up

    monkeypatch.setattr(LoadTuner, "wants", wants)
    monkeypatch.setattr(LoadTuner, "measure", lambda self, *given: measured.append(given))
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    slidesparse.load(tmp_path / "s", fallback="none")
    assert len(offered) == 14
    assert [(problem, packed.shape, fallback) for problem, packed, fallback in measured] == [
        (problem, (152, 64), "none") for problem in offered if problem.out_features == 152
    ]
    offered.clear()
    slidesparse.load(tmp_path / "s", fallback="none", tune="off")
    assert offered == []


def test_an_unknown_value_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^tune; got 'no'; needed auto or off$"):
        slidesparse.load(tmp_path, tune="no")  # type: ignore[arg-type]
