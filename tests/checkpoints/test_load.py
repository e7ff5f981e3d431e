"""``slidesparse.load`` measures before its layers choose, where that decides something."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import by_magnitude, make_checkpoint
from torch import nn

import slidesparse
from slidesparse.checkpoints import load
from slidesparse.errors import InputError
from slidesparse.gemm import Problem
from slidesparse.layer.linear import SlideLinear
from slidesparse.offline.prune import prune_checkpoint
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
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    slidesparse.load(tmp_path / "s", fallback="none")
    assert len(offered) == 14
    assert [(problem, packed.shape, fallback) for problem, packed, fallback in measured] == [
        (problem, (152, 64), "none") for problem in offered if problem.out_features == 152
    ]
    offered.clear()
    slidesparse.load(tmp_path / "s", fallback="none", tune="off")
    assert offered == []


def test_a_backend_that_was_named_runs_the_sparse_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    layers = {"re:.*down_proj": "dense"}
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", layers=layers))
    model = slidesparse.load(tmp_path / "s", backend="reference")
    slides = {name: module for name, module in model.named_modules() if isinstance(module, SlideLinear)}
    assert len(slides) == 14
    for name, slide in slides.items():
        assert slide.choice.backends == ("dense" if name.endswith("down_proj") else "reference",)


def test_an_unknown_value_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^tune; got 'no'"):
        slidesparse.load(tmp_path, tune="no")  # type: ignore[arg-type]


def test_threads_load_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where they met, modules of the whole process had parameters without values from then on.
    build, fill, inside, met = load.build_meta_model, load._load_rest, list[object](), list[int]()

    def enter(checkpoint: Any, **options: Any) -> Any:
        inside.append(checkpoint)
        time.sleep(0.1)
        return build(checkpoint, **options)

    def leave(*given: Any) -> None:
        fill(*given)
        met.append(len(inside))
        inside.pop()

    monkeypatch.setattr(nn.Module, "register_parameter", nn.Module.register_parameter)
    monkeypatch.setattr(load, "build_meta_model", enter)
    monkeypatch.setattr(load, "_load_rest", leave)
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    with ThreadPoolExecutor(3) as threads:
        models = list(threads.map(load.load, [tmp_path / "s"] * 3))
    tokens = torch.arange(4, 9).unsqueeze(0)
    answers = [model(input_ids=tokens).logits for model in models]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert met == [1, 1, 1]
