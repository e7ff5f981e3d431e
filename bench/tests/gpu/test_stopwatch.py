"""The stopwatch on a GPU: captures what can be captured, and believes no result that was not written."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from slidesparse.tuning.checking import WrongResult
from slidesparse.tuning.timing import CudaStopwatch
from slidesparse_bench import problems, runner
from slidesparse_bench.records import read_records

pytestmark = pytest.mark.gpu


@pytest.fixture
def stopwatch() -> CudaStopwatch:
    made = CudaStopwatch()
    made.begin()
    return made


def accept(result: object) -> None:
    """A check that takes anything."""


def test_a_graph_where_possible_and_events_where_the_call_waits(stopwatch: CudaStopwatch) -> None:
    x = torch.randn(256, 256, device="cuda")
    made = stopwatch.prepare([lambda: x + 1] * 3, True, accept)
    assert (made.method, made.copies) == ("graph", 3)
    assert made.launch()() > 0
    waits = stopwatch.prepare([lambda: torch.full((1,), x.sum().item(), device="cuda")], True, accept)
    assert waits.method == "events"
    assert waits.launch()() > 0
    stopwatch.begin()
    again = stopwatch.prepare([lambda: x + 1], True, accept)  # the next comparison captures again
    assert again.method == "graph"
    assert stopwatch.prepare([lambda: x + 1], False, accept).method == "events"


def test_a_graph_keeps_its_operands_alive(stopwatch: CudaStopwatch) -> None:
    operands = [torch.full((1 << 20,), float(i), device="cuda") for i in range(3)]
    watched = [weakref.ref(operand) for operand in operands]
    made = stopwatch.prepare([partial(torch.add, operand, 1) for operand in operands], True, accept)
    del operands
    gc.collect()
    assert all(reference() is not None for reference in watched)
    assert made.launch()() > 0


def test_a_graph_that_writes_nothing_is_found_out(stopwatch: CudaStopwatch) -> None:
    once = torch.ones(8, device="cuda")

    def check(result: torch.Tensor) -> None:
        if not torch.equal(result, torch.ones(8, device="cuda")):
            raise WrongResult("not written")

    with pytest.raises(WrongResult):
        stopwatch.prepare([lambda: once], True, check)


def test_a_small_run_measures_everything(tmp_path: Path) -> None:
    profile = replace(
        problems.PROFILES["quick"],
        models=("BitNet-2B",),
        dtypes=("int8", "bf16"),
        model_patterns=("6:8",),
        square_patterns=("6:8", "inf"),
        tokens=(64,),
        squares=(512,),
        kernel_columns=(2560,),
        samples_s=0.001,
        budget_s=1200.0,  # a guess from the first, slow case of a fresh machine must not leave any out
    )
    summary = runner.run(problems.BENCHMARKS, profile, runner.cuda_session(profile), tmp_path / "r.jsonl")
    records = read_records([tmp_path / "r.jsonl"])
    assert not summary.wrong
    assert not summary.left_out
    dense = [r for r in records if r.variant == "dense" and r.timing is not None]
    assert {r.case for r in dense} == {r.case for r in records if r.case.benchmark in ("gemm", "linear")}
    assert all(r.machine.driver and r.clocks_after.sm_mhz for r in records)
    assert any(r.timing and r.timing.method == "graph" and r.timing.copies > 1 for r in dense)
