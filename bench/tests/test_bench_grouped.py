"""The benchmark of experts on a CPU, tiny: its problems, its checks, its table."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench import FakeStopwatch
from test_bench import session as session_of

from slidesparse.cli import main
from slidesparse_bench import runner
from slidesparse_bench.expert_sizes import MIXTURES, ExpertSizes
from slidesparse_bench.kernels import expert_operands, grouped, grouped_stock
from slidesparse_bench.kernels.grouped_stock import Stock
from slidesparse_bench.kernels.mixtures import cases, profile_of
from slidesparse_bench.problems import PROFILES, Profile
from slidesparse_bench.records import GROUPED, Case, read_records
from slidesparse_bench.report import write_report
from slidesparse_bench.report.experts import expert_tables
from slidesparse_bench.report.numbers import comparisons

CPU = torch.device("cpu")
SIZES = ExpertSizes(hidden=32, inner=16, experts=4, top_k=2)
session = partial(session_of, patterns=("6:8",))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setitem(MIXTURES, "Tiny", SIZES)
    expert_operands.packed_experts.cache_clear()
    expert_operands.dense_experts.cache_clear()
    return replace(
        profile_of(PROFILES["quick"]), models=("Tiny",), dtypes=("int8", "fp8"), tokens=(1, 9), model_patterns=("6:8",)
    )


def test_everything_runs_and_is_right(tmp_path: Path, tiny: Profile) -> None:
    path = tmp_path / "r.jsonl"
    summary = runner.run((GROUPED,), tiny, session(), path)
    records = read_records([path])
    assert (summary.wrong, summary.refused, summary.left_out) == ((), {}, ())
    assert {record.case for record in records} == set(cases(tiny))
    variants = {record.case.layer.split(",")[0]: set() for record in records}
    for record in records:
        variants[record.case.layer.split(",")[0]].add(record.variant)
        assert record.error is not None
        assert record.error < 1e-2
    assert variants == {"gate_up": {"6:8", "plain 6:8"}, "down": {"6:8", "plain 6:8"}, "experts": {"6:8"}}


def test_bytes_are_those_of_the_experts_that_have_tokens(tiny: Profile) -> None:
    case = Case(GROUPED, "Tiny", "gate_up, balanced", "int8", 1, 32, 32)
    ours, plain = grouped.measure(session(), case)
    of_expert = 32 * 32 * 0.9375 + 4 * 32
    lifted_rows, products = 2 * (48 + 4), 2 * 32 * 2
    assert ours.n_bytes == 2 * of_expert + lifted_rows + products
    assert plain.n_bytes == of_expert + lifted_rows + products


@pytest.mark.parametrize("layer", ["gate_up, balanced", "down, skewed", "experts, balanced"])
def test_a_product_of_the_wrong_expert_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, tiny: Profile, layer: str
) -> None:
    case = Case(GROUPED, "Tiny", layer, "int8", 9, *SIZES.shape(layer.partition(",")[0]))
    kept = expert_operands.packed_experts(SIZES, "6:8", "int8", CPU)
    assert not isinstance(kept, str)
    rotated = {part: [*packed[1:], packed[0]] for part, packed in kept.packed.items()}
    wrong = expert_operands.PackedExperts(kept.layer, rotated)
    monkeypatch.setattr(grouped, "packed_experts", lambda *_: wrong)
    ours = grouped.measure(session(), case)[0]
    assert ours.timing is None
    assert (ours.why_not or "").startswith("WRONG RESULT")


def test_stock_is_measured_where_it_is_and_refused_where_it_changed(
    monkeypatch: pytest.MonkeyPatch, tiny: Profile
) -> None:
    case = Case(GROUPED, "Tiny", "experts, balanced", "int8", 9, 48, 32)
    monkeypatch.setattr(grouped_stock, "is_here", lambda: True)

    def layer(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *_: object) -> Stock:
        dense = expert_operands.dense_experts(SIZES, "int8", CPU)
        matrices = dense.matrices("gate_up"), dense.matrices("down")

        def run(*given: torch.Tensor) -> torch.Tensor:
            return expert_operands.expected_layer(*given, *matrices).to(torch.bfloat16)

        return Stock("exact", run, (x, weights, chosen), torch.arange(len(x)))

    monkeypatch.setattr(grouped, "stock_layer", layer)
    stock, ours = grouped.measure(session(FakeStopwatch(iter([30.0, 10.0]))), case)
    assert (stock.variant, stock.backend, stock.algorithm) == ("dense", "vllm", "exact")
    (table,) = expert_tables(comparisons([stock, ours]))
    assert [row[4] for row in table.rows] == ["exact", "6:8"]
    assert [row[-1] for row in table.rows] == [None, 3.0]

    monkeypatch.undo()
    monkeypatch.setitem(MIXTURES, "Tiny", SIZES)
    monkeypatch.setattr(grouped_stock, "is_here", lambda: True)
    missing = SimpleNamespace()
    monkeypatch.setattr(grouped_stock, "_of_moe", lambda module: missing)
    refused, ours = grouped.measure(session(), case)
    assert ours.timing is not None
    assert (refused.why_not or "").startswith("vLLM's experts; got AttributeError")


def test_the_command_prints_a_table_of_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Profile
) -> None:
    monkeypatch.setattr(runner, "cuda_session", lambda profile: session(FakeStopwatch(itertools.cycle([20.0, 15.0]))))
    path = tmp_path / "r.jsonl"
    arguments = ["--models", "Tiny", "--tokens", "9", "--dtype", "int8", "--patterns", "6:8"]
    assert main(["bench", "gemm", "--grouped", "--out", str(path), *arguments]) == 0
    _, title, table = capsys.readouterr().out.split("\n\n")
    assert title == "Experts of mixtures, INT8"
    head, *rows = table.splitlines()
    assert head.split()[:8] == ["mixture", "what", "routing", "M", "weights", "us", "TB/s", "TOPS"]
    assert len(rows) == 6
    assert len({len(row) for row in rows}) == 1
    cells = rows[0].split()
    assert cells[:6] == ["Tiny", "gate_up", "balanced", "9", "6:8", "20.0"]
    assert cells[8] == "75%"
    page, *_ = write_report(read_records([path]), tmp_path / "report")
    assert "## Experts of mixtures" in page.read_text()
    assert "| Tiny | gate_up | balanced | 9 | 6:8 | 20.0 |" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "gemm", "--grouped", "--models", "Qwen2.5-7B"], "unknown model; got 'Qwen2.5-7B'"),
        (["bench", "gemm", "--grouped", "--dtype", "bf16"], "unknown dtype; got 'bf16'; needed int8, fp8"),
        (["bench", "gemm", "--grouped", "--backends", "hopper"], "--backends; got --grouped"),
        (["bench", "linear", "--grouped"], "--grouped; got bench linear; needed bench gemm"),
    ],
)
def test_wrong_choices_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "r.jsonl")]) == 1
    assert words in capsys.readouterr().err
