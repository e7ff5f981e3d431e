"""Write a report: one Markdown page, a CSV file for each table, and the plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slidesparse.errors import InputError, system_words
from slidesparse_bench.records import Machine, Record
from slidesparse_bench.report import experts, tables
from slidesparse_bench.report.numbers import Comparison, Limits, comparisons, limits
from slidesparse_bench.report.table import Table, file_name

PAGE = "report.md"

ABOUT_SPEEDUP = """\
Speed-up: median time of the fastest dense product over the median time of the fastest backend of a pattern, in one
interleaved comparison with a cold L2 cache. Model shapes: the times of qkv, o, gate_up and down are added first. `inf`
is the control: a dense weight in slid form. The ideals are 2, 1.5, 1.33, 1.25, 1.2, 1.17 and 1.14 from 2:4 to 14:16,
and 1 for `inf`. `noise` is the difference of one variant timed twice: smaller differences mean nothing."""

ABOUT_EFFICIENCY = """\
Efficiency, as the paper defines it: the speed-up of a pattern over that of 2:4, divided by the ratio that the densities
promise, (S / S of 2:4) / (0.5 / density). 100 % means that sliding passes on all that 2:4 gains here. Values above
100 % follow from Amdahl's law: launches, epilogues and memory traffic do not shrink with the density, so 2:4 itself
falls short of 2x, and a pattern that does more work loses less than in proportion. They do not show a fast kernel."""

ABOUT_KERNELS = """\
`overhead` and `more us` are against our own quantise-only kernel: the same work without lifting. `of copy rate`
compares bytes a second, each counted once as read and once as written, with a device-to-device copy in the same
comparison."""

ABOUT_EXPERTS = """\
Products are one launch for all experts; `experts` is a whole layer, from the router's choice to the sum over the
experts of a token. `of plain`: of the rate of the kernel of one weight on as many rows. Bytes are those of experts that
have tokens, of rows as they are read, and of results. `over vllm`: over vLLM's own experts, in the same comparison."""

ABOUT_FUSED = """\
`over its bytes` divides the time by what the kernel's bytes, each counted once as read and once as written, take at the
rate of the copy of the same comparison."""

ABOUT_PLOTS = """\
Dashes at the right margins: the ideal. Dotted, where a copy was measured too: the roofline, the speed-up if dense and
sparse both ran at their limits, those of the fastest dense product and of the fastest copy among these records."""

Section = tuple[str, str, Callable[[Sequence[Comparison]], list[Table]]]

SECTIONS: tuple[Section, ...] = (
    ("Speed-up", ABOUT_SPEEDUP, tables.speedup_tables),
    ("Efficiency", ABOUT_EFFICIENCY, tables.efficiency_tables),
    ("Experts of mixtures", ABOUT_EXPERTS, experts.expert_tables),
    ("Kernels", ABOUT_KERNELS, tables.kernel_tables),
    ("Fused kernels", ABOUT_FUSED, tables.fused_tables),
    ("Cost of a whole layer", "", tables.layer_cost_tables),
    ("Packing", "", tables.pack_tables),
    ("Dense baselines", "The fastest of these, in each comparison, is the baseline.", tables.baseline_tables),
)


def write_report(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw everything that the records hold.

    Args:
        records: Records of one GPU model; of a problem measured several times the latest counts.
        folder: Made if it does not exist; files of an earlier report are replaced.

    Returns:
        The files written, the page first.

    Raises:
        InputError: No records, records of different GPUs, or a folder that cannot be written.
    """
    from slidesparse_bench.report import plots  # matplotlib takes a second

    gpus = sorted({record.machine.gpu for record in records})
    if not gpus:
        raise InputError("there are no records in these files", needed="files that slidesparse bench wrote")
    if len(gpus) > 1:
        raise InputError(
            "records of a report", got=", ".join(gpus), needed="records of one GPU", remedy="draw one a GPU"
        )
    found = comparisons(records)
    sections = [(heading, about, make(found)) for heading, about, make in SECTIONS]
    sections.append(("Without a time", "", tables.missing_tables(records)))

    def parts(pictures: list[str]) -> list[str]:
        plots_of = ["## Plots", ABOUT_PLOTS, *pictures] if pictures else []
        head = [f"# Benchmarks on {gpus[0]}", _conditions(records, limits(found)), *plots_of]
        return head + [part for section in sections for part in _section(*section)]

    written = [table for _, _, made in sections for table in made]
    written.append(tables.everything(found))
    return write_page(folder / PAGE, lambda where: _draw(plots, found, where), parts, written)


def write_page(
    page: Path, draw: Callable[[Path], list[Path]], parts: Callable[[list[str]], list[str]], made: Iterable[Table]
) -> list[Path]:
    """Write pictures, a page that shows them, and a CSV file for each table, into one folder.

    All is written beside its place first, so a full disk leaves an earlier report whole; links are replaced.

    Args:
        page: The page, whose folder is made if it does not exist.
        draw: Draws the pictures into a folder, and returns them.
        parts: Returns the page's paragraphs, given a line for each picture.
        made: The tables.

    Returns:
        The files written, the page first.

    Raises:
        InputError: The folder cannot be written.
    """
    import matplotlib

    folder, files = page.parent, {f"{file_name(table.name)}.csv": table.csv() for table in made}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".report-", dir=folder) as new:
            with matplotlib.rc_context({"text.parse_math": False}):  # names may hold dollar signs
                pictures = [path.name for path in draw(Path(new))]
            text = "\n\n".join(parts([f"![{Path(name).stem}]({name})" for name in pictures])) + "\n"
            for name, content in {page.name: text, **files}.items():
                (Path(new) / name).write_text(content, encoding="utf-8", newline="")
            for path in sorted(Path(new).iterdir()):
                path.replace(folder / path.name)
    except OSError as error:
        raise InputError(
            "cannot write the report", got=system_words(error), needed="a folder that can be written"
        ) from error
    return [page, *(folder / name for name in (*pictures, *files))]


def _draw(plots: Any, found: Sequence[Comparison], folder: Path) -> list[Path]:
    titles = {
        "gemm": "GEMM over the fastest dense product",
        "linear": "Whole linear layers over the fastest dense layer",
    }
    drawn = [
        path for benchmark, title in titles.items() for path in plots.draw_speedups(found, benchmark, title, folder)
    ]
    path = folder / "kernels.png"
    return [*drawn, path] if plots.draw_kernels(found, path) else drawn


def _section(heading: str, about: str, made: Sequence[Table]) -> list[str]:
    """Return the Markdown of a section, nothing when it has no tables."""
    if not made:
        return []
    parts = [f"## {heading}"] + ([about] if about else [])
    for table in made:
        parts += ([f"### {table.title}"] if len(made) > 1 else []) + [table.markdown()]
    return parts


def _conditions(records: Sequence[Record], known: Limits) -> str:
    """Return the conditions of the records: dates, machines, clocks and limits."""
    machines = list(dict.fromkeys(record.machine for record in records))
    dates = sorted(record.started[:10] for record in records)
    lines = [f"* {dates[0]}" if dates[0] == dates[-1] else f"* {dates[0]} to {dates[-1]}"]
    lines += [machine_line(machine) for machine in machines]
    loads = sorted(r.clocks_after.sm_mhz for r in records if r.timing is not None and r.clocks_after.sm_mhz is not None)
    if loads:
        lines.append(f"* SM clock under load: {loads[0]:.0f} to {loads[-1]:.0f} MHz, half of the time {_half(loads)}")
    if known.bandwidth is not None:
        lines.append(f"* fastest copy: {known.bandwidth / 1e3:.0f} GB/s, read and written together")
    lines += [f"* fastest dense {dtype.upper()}: {peak / 1e6:.0f} TOPS" for dtype, peak in known.peak.items()]
    return "\n".join(lines)


def machine_line(machine: Machine) -> str:
    """Return a line with a GPU and its libraries."""
    versions = {
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "torch": machine.torch,
        "Triton": machine.triton,
        "cuSPARSELt": machine.cusparselt,
        "vLLM": machine.vllm,
        "slidesparse": machine.slidesparse,
        "commit": machine.commit,
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"* sm {machine.capability}, {machine.memory_gb:g} GB, L2 {machine.l2_mb:g} MB; {known}"


def _half(ordered: Sequence[float]) -> str:
    return f"below {ordered[len(ordered) // 2]:.0f}"
