"""Reports from synthetic records: every number here can be computed by hand."""

from __future__ import annotations

import csv
import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_records import MACHINE, SHAPES, case, record
from matplotlib.image import imread

from slidesparse.cli import main
from slidesparse.errors import InputError
from slidesparse_bench.known_models import LAYERS
from slidesparse_bench.records import CONTROL, COPY, DENSE_VARIANT, QUANTIZE, SQUARE, Case, Record, read_records
from slidesparse_bench.report import write_report
from slidesparse_bench.report.numbers import Limits, comparisons, limits, points
from slidesparse_bench.report.table import file_name

DENSE_US = dict(zip(LAYERS, (10.0, 20.0, 40.0, 30.0), strict=True))
SPARSE_US = {"2:4": (5.0, 10.0, 25.0, 10.0), "6:8": (10.0, 15.0, 35.0, 20.0)}
IDEAL = {"2:4": 2.0, "6:8": 4 / 3, CONTROL: 1.0, "auto 6:8": 4 / 3}


def model_records(tokens: int = 64, benchmark: str = "gemm", slower: float = 1.0) -> list[Record]:
    """Dense 100 us a layer; 2:4 50 us; 6:8 80 us; a second dense library that always loses."""
    found = []
    for index, layer in enumerate(LAYERS):
        of = case(layer, tokens, benchmark=benchmark)
        found.append(record(of, DENSE_VARIANT, DENSE_US[layer] * slower, backend="vllm", ideal=1.0, n_bytes=1000))
        found.append(record(of, DENSE_VARIANT, DENSE_US[layer] * slower + 1, ideal=1.0, n_bytes=1000))
        for variant, times in SPARSE_US.items():
            us = times[index] * slower
            found.append(record(of, variant, us, backend="cusparselt", ideal=IDEAL[variant], n_bytes=900))
            found.append(record(of, variant, us * 2, backend="slow", ideal=IDEAL[variant], n_bytes=900))
    return found


def square_records(dtype: str = "fp8") -> list[Record]:
    of = Case("gemm", SQUARE, "", dtype, 512, 512, 512, scaled=False)
    times = {DENSE_VARIANT: 12.0, "2:4": 8.0, "6:8": 10.0, CONTROL: 16.0}
    return [record(of, name, us, ideal=IDEAL.get(name, 1.0), n_bytes=500) for name, us in times.items()]


def kernel_records() -> list[Record]:
    of = Case("kernels", "", "", "int8", 4096, 0, 2560)
    return [
        record(of, COPY, 10.0, n_bytes=40_000),  # 4000 bytes a us
        record(of, QUANTIZE, 8.0, backend="slidesparse", n_bytes=30_000),
        record(of, QUANTIZE, 5.0, backend="vllm", n_bytes=30_000),
        record(of, "lift 6:8", 10.0, backend="slidesparse", n_bytes=35_000),
        record(of, "lift 2:4", 9.0, backend="slidesparse", n_bytes=30_000),
        record(of, "silu_mul lift 6:8", 18.0, backend="slidesparse", n_bytes=60_000),
    ]


def pack_records() -> list[Record]:
    of = replace(case("gate_up", 0, benchmark="pack"), dtype="bf16")
    return [record(of, "pack 6:8", 2.0, backend="slidesparse")]


def report(records: list[Record], folder: Path) -> dict[str, list[dict[str, str]]]:
    """Write a report and read its CSV files back."""
    written = write_report(records, folder)
    assert sorted(written) == sorted(folder.iterdir())
    return {
        path.stem: list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        for path in written
        if path.suffix == ".csv"
    }


def test_speedups_are_of_sums_over_the_fastest_dense(tmp_path: Path) -> None:
    tables = report(model_records() + model_records(128, slower=2.0), tmp_path)
    first, second = tables["gemm_model_int8_speedup"]
    assert (first["model"], first["M"], float(first["dense us"])) == ("Tiny", "64", 100.0)
    assert float(first["2:4"]) == 100 / 50
    assert float(first["6:8"]) == 100 / 80
    assert float(first["noise"]) == 0.004
    operations = sum(2 * 64 * out * columns for out, columns in SHAPES.values())
    assert float(first["dense TOPS"]) == pytest.approx(operations / 100e-6 / 1e12)
    assert (second["M"], float(second["dense us"]), float(second["6:8"])) == ("128", 200.0, 1.25)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| Tiny | 64 | 100.0 | 0 | 2.00 | 1.25 | 0.4% |" in text


def test_efficiency_is_the_papers(tmp_path: Path) -> None:
    tables = report(model_records() + square_records(), tmp_path)
    (model,) = tables["gemm_model_int8_efficiency"]
    # (1.25 / 2) / (0.5 / 0.75)
    assert float(model["6:8"]) == pytest.approx(0.9375)
    assert float(model["2:4"]) == 1.0
    (square,) = tables["gemm_square_fp8_bare_efficiency"]
    # ((12/10) / (12/8)) / (0.5 / 0.75) = 1.2; the control: ((12/16) / (12/8)) / 0.5 = 1
    assert float(square["6:8"]) == pytest.approx(1.2)
    assert float(square[CONTROL]) == pytest.approx(1.0)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 120% |" in text
    assert "Amdahl's law" in text


def test_kernels_are_measured_against_our_own_quantisation_and_a_copy(tmp_path: Path) -> None:
    rows = report(kernel_records(), tmp_path)["kernels_int8"]
    assert [row["pattern"] for row in rows] == ["2:4", "6:8"]
    row = rows[1]
    assert (row["K"], row["M"], float(row["copy us"])) == ("2560", "4096", 10.0)
    assert (float(row["quantize us"]), float(row["vLLM quantize us"])) == (8.0, 5.0)
    assert float(row["quantize+lift us"]) == 10.0
    assert float(row["overhead"]) == 0.25
    assert float(row["more us"]) == 2.0
    assert float(row["of copy rate"]) == pytest.approx(3500 / 4000)
    assert "| +25% | 2.0 | 88% |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_fused_kernels_are_measured_against_their_bytes(tmp_path: Path) -> None:
    (row,) = report(kernel_records(), tmp_path)["kernels_fused_int8"]
    assert (row["after"], row["pattern"], row["K"], row["M"]) == ("silu_mul", "6:8", "2560", "4096")
    assert (float(row["bytes at copy rate us"]), float(row["us"]), float(row["over its bytes"])) == (15.0, 18.0, 1.2)
    without_copy = [r for r in kernel_records() if r.variant != COPY]
    assert "kernels_fused_int8" not in report(without_copy, tmp_path / "other")


def test_packing_counts_dense_bytes(tmp_path: Path) -> None:
    (row,) = report(pack_records(), tmp_path)["pack"]
    assert float(row["dense GB/s"]) == 96 * 32 * 2 / 2.0 / 1e3
    assert row["step"] == "pack 6:8"


def test_the_latest_comparison_of_a_problem_counts_as_a_whole() -> None:
    old = [replace(r, started="2026-11-19T10:00:00.000000+00:00") for r in square_records()]
    # The newer one has no 6:8: the older 6:8 must not be divided by the newer dense.
    new = [replace(r, variant=r.variant) for r in square_records() if r.variant != "6:8"]
    (one,) = comparisons(new + old)
    assert one.best("6:8") is None
    assert {r.started for r in one.records} == {new[0].started}


def test_a_layer_that_is_missing_leaves_its_point_out() -> None:
    found = comparisons([r for r in model_records() if r.case.layer != "down"])
    assert points(found, "gemm") == []
    partly = comparisons([r for r in model_records() if (r.case.layer, r.variant) != ("down", "6:8")])
    (point,) = points(partly, "gemm")
    assert point.variants == ["2:4"]
    assert point.speedup("6:8") is None


def test_limits_are_the_best_that_was_reached() -> None:
    found = comparisons(square_records() + square_records("bf16") + kernel_records())
    known = limits(found)
    assert known.bandwidth == 4000
    assert known.peak == {"fp8": 2 * 512**3 / 12.0, "bf16": 2 * 512**3 / 12.0}
    assert limits(comparisons(kernel_records()[1:])) == Limits(None, {})


def test_the_roofline_takes_the_slower_of_arithmetic_and_memory() -> None:
    (point,) = points(comparisons(square_records()), "gemm")
    operations = point.parts[0].case.n_operations
    by_arithmetic = Limits(bandwidth=1e9, peak={"fp8": operations / 10})
    assert point.roofline("6:8", by_arithmetic) == pytest.approx(4 / 3)
    by_memory = Limits(bandwidth=1.0, peak={"fp8": 1e12})
    assert point.roofline("6:8", by_memory) == pytest.approx(1.0)  # the same bytes
    # Dense 10 us of arithmetic; 6:8 needs 7.5 us of arithmetic and 500 bytes / 50 = 10 us of memory.
    assert point.roofline("6:8", Limits(50.0, {"fp8": operations / 10})) == pytest.approx(1.0)
    assert point.roofline("6:8", Limits(None, {"fp8": 1.0})) is None


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    everything = model_records() + model_records(128, slower=1.9) + model_records(benchmark="linear")
    report(everything + square_records() + kernel_records(), tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a").glob("*.png"))
    assert names == ["gemm_speedup_square_bare.png", "gemm_speedup_tiny.png", "kernels.png", "linear_speedup_tiny.png"]
    text = (tmp_path / "a" / "report.md").read_text(encoding="utf-8")
    for name in names:
        pixels = imread(tmp_path / "a" / name)
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 0.05  # something is on it
        assert f"]({name})" in text
    report(pack_records(), tmp_path / "b")
    assert not list((tmp_path / "b").glob("*.png"))


def test_one_gpu_a_report(tmp_path: Path) -> None:
    others = [*square_records(), replace(square_records()[0], machine=replace(MACHINE, gpu="Other"))]
    with pytest.raises(InputError):
        write_report(others, tmp_path)
    with pytest.raises(InputError):
        write_report([], tmp_path)


def test_the_command_writes_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, records in (("a", model_records()), ("b", kernel_records())):
        (tmp_path / f"{name}.jsonl").write_text("".join(r.to_line() + "\n" for r in records))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(["report", *files, "--out", str(tmp_path / "out")]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == str(tmp_path / "out" / "report.md")
    assert all(Path(line).is_file() for line in listed)
    assert {"gemm_model_int8_speedup.csv", "kernels_int8.csv"} <= {Path(line).name for line in listed}


def test_command_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    line = square_records()[0].to_line()
    (tmp_path / "good.jsonl").write_text(line + "\n")
    (tmp_path / "cut.jsonl").write_text(f"{line}\n{line[:-9]}")
    (tmp_path / "plan.json").write_text("{}")  # whole, but nothing that bench wrote
    for arguments, words in (
        (["cut.jsonl", "--out", "o"], "; its writer was stopped in the middle of it: delete that line"),
        (["plan.json", "--out", "o"], "plan.json, line 1: format of a benchmark record; got None; needed 1; give"),
        (["none.jsonl", "--out", "o"], "none.jsonl is missing; needed a file that slidesparse bench wrote"),
        (["none.jsonl.gz", "--out", "o"], "none.jsonl.gz is missing"),
        (["good.jsonl", "--out", "bad.jsonl"], "cannot write the report; got File exists: "),
    ):
        paths = [argument if argument.startswith("--") else str(tmp_path / argument) for argument in arguments]
        assert main(["report", *paths]) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert words in captured.err
        assert "Errno" not in captured.err


@pytest.mark.parametrize("name", ["a$b", r"a$\no$", "maker/model", "../out", "a|b", "n" * 300])
def test_any_name_of_a_model_is_drawn(tmp_path: Path, name: str) -> None:
    records = [replace(one, case=replace(one.case, model=name)) for one in model_records()]
    files = report(records, tmp_path / "r")
    assert files["records"][0]["model"] == name
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert "| a\\|b |" in (tmp_path / "r/report.md").read_text() or "|" not in name


def test_names_of_files_tell_models_apart() -> None:
    assert len({file_name(name) for name in ("a/b", "a_b", "a$b", "n" * 300, "n" * 301)}) == 5


def test_names_with_control_characters_are_refused(tmp_path: Path) -> None:
    for changed in (
        replace(square_records()[0], case=replace(case(), model="a\0b")),
        replace(square_records()[0], machine=replace(MACHINE, gpu="a\x1b[31m")),
    ):
        (tmp_path / "r.jsonl").write_text(changed.to_line() + "\n")
        with pytest.raises(InputError, match=r"line 1: record.* needed text without control"):
            read_records([tmp_path / "r.jsonl"])


def test_links_are_replaced_and_not_written_through(tmp_path: Path) -> None:
    """Whoever may write into the folder would choose what is overwritten."""
    own = tmp_path / "own.txt"
    own.write_text("of the user")
    names = [path.name for path in write_report(square_records(), tmp_path / "r")]
    for name in names:
        (tmp_path / "r" / name).unlink()
        (tmp_path / "r" / name).symlink_to(own)
    write_report(square_records(), tmp_path / "r")
    assert own.read_text() == "of the user"
    assert not any(path.is_symlink() for path in (tmp_path / "r").iterdir())


def test_a_full_disk_leaves_the_earlier_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(square_records(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write = Path.write_text

    def full(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "records.csv":  # the last
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError):
        write_report(square_records() + kernel_records(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
