"""The pages say what the records and the code say, and are written as CONTRIBUTING.md asks."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from slidesparse import __version__
from slidesparse.cli import build_parser, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/slidesparse"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
HISTORY = ROOT / "docs/log"
DRAWN = {ROOT / "docs/modules.md"}
"""Written by a script, from the words of the code."""

MEASURED = runpy.run_path(str(ROOT / "benchmarks/measured.py"))
INDEX = runpy.run_path(str(ROOT / "benchmarks/index_results.py"))
MODULES = runpy.run_path(str(ROOT / "docs/draw_modules.py"))


WORDS = 30
"""Of a sentence."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> list[str]:
    """Paragraphs and list items, without code, tables, headings and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "!["))]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MEASURED["PAGES"], ids=name)
def test_tables_are_what_the_records_say(path: Path) -> None:
    text = path.read_text()
    assert MEASURED["MARKED"].search(text)
    assert MEASURED["drawn"](text) == text, "run python benchmarks/measured.py --write"


def test_every_table_stands_on_a_page_and_every_marker_names_one() -> None:
    used = [found for path in MEASURED["PAGES"] for found in re.findall(r"<!-- table: ([\w.-]+) -->", path.read_text())]
    assert sorted(used) == sorted(MEASURED["TABLES"])


def test_a_changed_figure_is_noticed() -> None:
    text = (ROOT / "docs/measured.md").read_text()
    found = re.search(r"\| prefill 16384 \| [\d.]+ \| ([\d.]+)", text)
    assert found is not None
    changed = text[: found.start(1)] + "9.99" + text[found.end(1) :]
    assert MEASURED["drawn"](changed) == text


STARTS = ROOT / "results/h200/vllm/http-starts.txt"
SERVED = ROOT / "results/h200/serve"
LOG = "docs/log/served-models.md"


def test_figures_in_sentences_are_those_of_the_records() -> None:
    said = {}
    for part in STARTS.read_text().split("\n== ")[1:]:  # 6:8 and 4:6 a second time, as they are now
        name, rest = part.split("\n", 1)
        said[name] = re.findall(r"Model loading took ([\d.]+) GiB", rest), re.findall(r"take ([\d.]+) GB", rest)
    stock, *pruned = (said[name][0][0] for name in ("stock", "6:8", "4:6", "2:4"))
    short = [f"{float(size):.1f}" for size in (*pruned, stock)]
    measured, readme = (ROOT / "docs/measured.md").read_text(), (ROOT / "README.md").read_text()
    assert (
        f"takes {stock} GiB in stock vLLM, and {pruned[0]}, {pruned[1]} and {pruned[2]} at 6:8, 4:6 and 2:4" in measured
    )
    assert f"takes {short[0]}, {short[1]} and {short[2]} GiB at 6:8, 4:6 and 2:4, stock {short[3]}" in readme
    assert [said[name][1] for name in ("6:8", "4:6", "2:4")] == [["6.12"], ["5.51"], ["4.08"]]
    assert "6.53 GB, and 6.12, 5.51 and 4.08" in measured
    _, copied = re.findall(r"Model loading took ([\d.]+) GiB", (ROOT / "results/h200/vllm/one-form.txt").read_text())
    assert f"With dense copies it took [{copied} GiB]" in measured
    small = MEASURED["engines"]("llama-3.2-1b-int8-auto.jsonl")
    nothing = [one for (kind, m), one in small.items() if kind == "decode" or (kind == "prefill" and m <= 2048)]
    gains = [
        (MEASURED["speedup"](one, pattern), MEASURED["spread"](one)) for one in nothing for pattern in ("2:4", "6:8")
    ]
    assert all(gain - 1 < spread for gain, spread in gains), "a model of 1 B gains nothing there, say three pages"


def test_what_the_readme_says_of_requests_over_http() -> None:
    rows = [line.strip("| ").split(" | ") for line in MEASURED["served_http"]().splitlines()]
    assert [cell.split()[0] for cell in rows[0][-3:]] == ["6:8", "4:6", "2:4"]
    mixed, first = (next(row for row in rows if row[0].startswith(name)) for name in ("mixed", "arrivals"))
    gains = [cell.split("(")[1].strip(")") for cell in mixed[-3:]]
    waits = [f"{float(cell.split()[0]):.0f}" for cell in first[-3:]]
    best = f"{min(map(float, first[1:4])):.0f}"
    readme = (ROOT / "README.md").read_text()
    assert f"serve the mixed load {gains[0]}, {gains[1]} and {gains[2]} times as fast" in readme
    larger, five = (gains_of(MEASURED["TABLES"][f"served-http-{name}"]()) for name in ("graphs", "five"))
    said = " ".join(readme.split())
    assert f"after {waits[0]}, {waits[1]} and {waits[2]} ms, in stock after {best}." in said
    assert f"6:8 and 2:4 serve it {larger['6:8']} and {larger['2:4']} times as fast" in said
    assert f"6:8 had {five['6:8']} and {five['6:8 again']}, 4:6 had {five['4:6']} and 2:4 {five['2:4']}." in said


def gains_of(table: str) -> dict[str, str]:
    """Engine -> how many times faster it is in the first row of a table."""
    head, _, row, *_ = (line.strip("| ").split(" | ") for line in table.splitlines())
    return {engine: cell.split("(")[1].strip(")") for engine, cell in zip(head, row, strict=True) if "(" in cell}


def test_what_the_readme_says_of_a_whole_mixture() -> None:
    _, _, burst, _, _, decode = (
        line.strip("| ").split(" | ") for line in MEASURED["TABLES"]["served-mixture-whole"]().splitlines()
    )
    bursts, decodes = ([cell.split("(")[1].strip(")") for cell in row[-3:]] for row in (burst, decode))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"answer bursts {bursts[0]}, {bursts[1]} and {bursts[2]}, and decode 64 sequences" in readme
    assert f"decode 64 sequences {decodes[0]}, {decodes[1]} and {decodes[2]} times as fast" in readme


def test_what_the_pages_say_of_the_served_loads() -> None:
    slower, apart = [], []
    for dtype in ("int8", "fp8"):
        group = MEASURED["served_group"](dtype)
        nearer = {engine: MEASURED["nearer_stock"](dtype, engine) for engine in ("control", "6:8", "4:6", "2:4")}
        assert nearer == {"control": "stock", "6:8": "stock again", "4:6": "stock again", "2:4": "stock again"}
        slower.append(group.over("stock again", "stock", "mixed"))
        apart += [
            max(times) / min(times) - 1 for served in group.records.values() for times in [served["mixed"].seconds]
        ]
        for load in ("burst", "mixed"):
            assert group.over("control", "6:8", load) < 1.02
    assert [f"{100 * (over - 1):.0f}" for over in slower] == ["1", "1"]
    assert f"{100 * max(apart):.0f}" == "4"
    mixed = {engine: served["mixed"].power for engine, served in MEASURED["served_group"]("int8").records.items()}
    kilojoules = {engine: f"{power.energy_j / 1e3:.1f}" for engine, power in mixed.items()}
    assert [kilojoules[engine] for engine in ("6:8", "stock again", "control")] == ["17.3", "18.3", "17.2"]


def test_what_the_pages_say_of_an_h100() -> None:
    """By the newest kernel, and by an older one."""
    readme, cards, log = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/cards.md", LOG))
    over_control, saved = [], []
    for name in ("int8-control", "int8"):
        path = MEASURED["H100"] / f"serve/qwen2.5-7b-{name}.jsonl"
        (group,) = MEASURED["groups"](MEASURED["read"](MEASURED["ServeRecord"], [path]))
        mixed = {engine: served["mixed"].power.energy_j / 2e3 for engine, served in group.records.items()}
        over_control.append(f"{group.over('control', '6:8', 'mixed'):.2f}")
        saved.append(f"{100 * (1 - mixed['6:8'] / mixed['control']):.0f} % less")
        kilojoules = [f"{mixed[engine]:.1f}" for engine in ("6:8", "control", "stock")]
        assert "takes {} kJ where the control takes {} and stock {}".format(*kilojoules) in log
    assert f"too: {over_control[0]} in the mixed load, for {saved[0]} energy" in cards
    assert f"By `hopper-4` it had {over_control[1]}, for {saved[1]}" in cards
    (row,) = (line for line in MEASURED["TABLES"]["served-h100-newest"]().splitlines() if "7B, mixed load" in line)
    over_stock = re.findall(r"\(([\d.]+)\)", row)[1]
    assert f"On an [H100](docs/cards.md#served-on-an-h100) it was {over_control[0]} and {over_stock}." in readme


def test_what_the_pages_say_of_six_bits_on_an_h200() -> None:
    readme, cards, log = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/cards.md", LOG))
    (group,) = MEASURED["groups"](MEASURED["read"](MEASURED["ServeRecord"], [SERVED / "qwen2.5-7b-int8-6bit.jsonl"]))
    six = "6:8 hopper-6bit"
    rows = {line.split("|")[1].strip(): line for line in MEASURED["TABLES"]["served-h200-6bit"]().splitlines()}
    mixed = re.findall(r"\(([\d.]+)\)", rows["7B, mixed load: 1000 requests, ms"])
    over = {engine: f"{group.over('control', engine, 'mixed'):.2f}" for engine in ("6:8", six)}
    said = f"mixed load {over['6:8']} times as fast as the control, and {mixed[1]} times as fast as stock, on an [H200]"
    assert said in readme
    steps = [re.findall(r"\(([\d.]+)\)", rows[f"7B, decoding, a step of {n} sequences, ms"])[2] for n in (16, 64)]
    assert f"decode 16 and 64 sequences {steps[0]} and {steps[1]} times as fast as stock" in readme
    computed = [MEASURED["_computing"](group, engine) for engine in ("control", six, "6:8")]
    gpu = [f"{computed[0] / one:.2f}" for one in computed[1:]]
    text = (
        f"6:8 has {over[six]} in the mixed load, with eight bits {over['6:8']}, and {gpu[0]} and {gpu[1]} of what the"
    )
    assert text in cards
    kilojoules = [group.records[engine]["mixed"].power.energy_j / 2e3 for engine in (six, "6:8", "control", "stock")]
    assert (
        "takes {:.1f} kJ with six bits, {:.1f} with eight, {:.1f} in the control and {:.1f}".format(*kilojoules) in log
    )
    assert f"{over['6:8']} by the newest kernel, for {100 * (1 - kilojoules[1] / kilojoules[2]):.0f} % less." in cards


def test_what_the_pages_say_of_an_h100_in_fp8() -> None:
    """And of its host, by one stock engine on two machines."""
    read, serve, computing = MEASURED["read"], MEASURED["H100"] / "serve", MEASURED["_computing"]
    names = ("fp8", "int8-stock-slow-host", "int8", "fp8-stock")
    found = [MEASURED["groups"](read(MEASURED["ServeRecord"], [serve / f"qwen2.5-7b-{name}.jsonl"])) for name in names]
    (fp8,), (slow,), (usual,), (usual_fp8,) = found
    cards, log = (" ".join((ROOT / page).read_text().split()) for page in ("docs/cards.md", LOG))
    served = [f"{group.seconds('stock', 'mixed'):.1f}" for group in (slow, usual, fp8, usual_fp8)]
    gpu = [f"{computing(group, 'stock'):.1f}" for group in (slow, usual, fp8, usual_fp8)]
    assert "in INT8 took {} s there".format(*served) in cards
    assert "where it took {1} s above. Of these the GPU computed for {2} and {3} s.".format(*served[:2], *gpu) in cards
    assert "mixed load {} and {} s. Of these the GPU computed for {} and {} s.".format(*served[:2], *gpu[:2]) in log
    assert "the same: {} and {} s, of these {} and {}.".format(*served[2:], *gpu[2:]) in log
    over = [f"{computing(fp8, 'control') / computing(fp8, pattern):.2f}" for pattern in ("6:8", "4:6", "2:4")]
    as_served = [f"{fp8.over('control', pattern, 'mixed'):.2f}" for pattern in ("6:8", "4:6", "2:4")]
    assert "GPU computes: {}, {} and {}; as served {}, {} and {}.".format(*over, *as_served) in log
    said = "gain {1} and {2} of what the GPU computes there, and {4} and {5} as served"
    assert said.format(*over, *as_served) in cards
    power = {engine: served["mixed"].power for engine, served in fp8.records.items()}
    kilojoules = [power[engine].energy_j / 2e3 for engine in ("6:8", "control", "stock")]
    assert "takes {:.1f} and {:.1f} kJ, stock {:.1f}.".format(*kilojoules) in log
    assert f"takes {100 * (kilojoules[0] / kilojoules[1] - 1):.0f} % more energy" in cards
    assert f"the control computes the mixed load in {computing(fp8, 'control'):.1f} s" in cards
    assert f"in INT8 the plugin takes {computing(usual, '6:8'):.1f} s" in cards


@pytest.mark.parametrize("name", ["qwen2.5-7b-int8-http", "qwen2.5-7b-int8-http-five"])
def test_on_one_machine_the_gpu_computes_a_little_faster_at_6_of_8(name: str) -> None:
    (group,) = MEASURED["groups"](MEASURED["read"](MEASURED["ServeRecord"], [SERVED / f"{name}.jsonl"]))
    over = MEASURED["_computing"](group, "control") / MEASURED["_computing"](group, "6:8")
    assert f"{over:.2f}" == "1.03"
    assert f"the GPU computes {over:.2f} times as fast as in the control" in (ROOT / "docs/measured.md").read_text()


def test_what_the_page_says_of_hosts_that_decided() -> None:
    (group,) = MEASURED["groups"](MEASURED["read"](MEASURED["ServeRecord"], [SERVED / "llama-3.2-1b-int8.jsonl"]))
    busy = [100 * served["decode 64 at 80"].power.busy for served in group.records.values()]
    assert f"computes for {min(busy):.0f} to {max(busy):.0f} % of the time" in (ROOT / "docs/measured.md").read_text()


def test_most_of_a_mixed_step_is_dense_at_6_of_8() -> None:
    """And the host was slower in the minutes of 6:8, by what vLLM's own part of a step took."""
    rows = [line.split(" | ") for line in MEASURED["mixed_steps"]().splitlines()[2:]]
    cells = {(row[0].removeprefix("| "), row[1]): [float(cell.strip("% |")) for cell in row[2:]] for row in rows}
    for tokens in ("513 to 1024", "1025 to 2048", "2049 to 4096"):
        control, ours = cells[tokens, "control"], cells[tokens, "6:8"]
        assert abs(ours[0] - control[0]) < 0.35  # GPU busy
        assert 0 < ours[1] < 0.1 * ours[0]
        assert 1.4 < ours[5] / control[5] < 1.9  # preprocess
        assert 1.05 < ours[6] / control[6] < 1.11  # forward, relative to it


@pytest.mark.parametrize(
    ("name", "told"), [("speed", "1.17\N{MULTIPLICATION SIGN}"), ("loss", "patterns mixed by a plan")]
)
def test_pictures_are_current(name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra report) is not installed")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    drawing = runpy.run_path(str(ROOT / f"docs/figures/{name}.py"))
    drawing["draw"](tmp_path / "drawn.svg")
    paths = drawing["FIGURES"] / f"{name}.svg", tmp_path / "drawn.svg"
    texts = [re.findall(r">([^<>\n]+)<", path.read_text()) for path in paths]
    assert texts[0] == texts[1]  # texts, not bytes: another matplotlib writes other bytes
    assert told in texts[0]


# -- records -------------------------------------------------------------------------------------------------------


def test_the_index_names_every_record_and_nothing_else() -> None:
    assert INDEX["files"]() == sorted(INDEX["descriptions"]())
    assert INDEX["INDEX"].read_text() == INDEX["index"](), "run python benchmarks/index_results.py --write"


@pytest.mark.parametrize("record", INDEX["files"]())
def test_every_record_is_cited(record: str) -> None:
    pages = INDEX["cited_by"](record)
    assert pages, "delete it, or cite it"
    if not record.startswith("history/"):
        assert any("log/" not in page for page in pages), "a record that only the log cites belongs into history/"


REPORTS = ["h200/report-gemm/report.md", "h200/report-vllm/report.md", "h200/serve/report/serve.md"]


@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_what_their_command_draws(report: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra report) is not installed")
    *words, folder = INDEX["descriptions"]()[report]["command"].split()[1:]
    page = Path("results", report)
    assert folder == page.parent.as_posix()
    words = [str(ROOT / word) if word.endswith((".jsonl", ".jsonl.gz")) else word for word in words]
    assert main([*words, str(tmp_path)]) == 0
    assert (tmp_path / page.name).read_text() == (ROOT / page).read_text()


def test_current_pages_cite_current_records() -> None:
    for path in PAGES:
        if HISTORY not in path.parents:
            assert "results/history" not in path.read_text().replace("`results/history/`", ""), name(path)


# -- code ----------------------------------------------------------------------------------------------------------


def test_the_map_of_modules_is_current() -> None:
    page = MODULES["PAGE"].read_text()
    assert page == MODULES["page"](), "run python docs/draw_modules.py --write"
    named = re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE)
    assert sorted(named) == [path.relative_to(PACKAGE).as_posix() for path in MODULES["files"]()]


@pytest.mark.parametrize("path", [path for path in PAGES if path not in DRAWN], ids=name)
def test_named_source_files_exist(path: Path) -> None:
    for named in re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|cuh?))`", path.read_text()):
        assert "NAME" in named or any((base / named).exists() for base in (ROOT, PACKAGE)), named


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_parse(path: Path) -> None:
    for block in code_blocks(path.read_text(), "bash"):
        for line in re.findall(r"^(?:.*&& )?(slidesparse .*)", block, re.MULTILINE):
            assert build_parser().parse_args(shlex.split(line, comments=True)[1:]).command


def test_options_of_bench_serve_parse() -> None:
    """Those of the table, and what its cells name beside them."""
    table = (ROOT / "docs/serving.md").read_text().partition("| option | effect |")[2].partition("\n\n")[0]
    for option in re.findall(r"`(--[^`]+)`", table):
        assert build_parser().parse_args(["bench", "serve", "--out", "x.jsonl", *shlex.split(option)]).command


def test_messages_that_troubleshooting_explains_exist() -> None:
    """Every quoted message, without the parts that differ from case to case, stands in the source."""
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    source = re.sub(r"\{[^{}]*\}", "{}", source)
    tables = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    missing = []
    for quoted in re.findall(r"`([^`]+)`", "\n".join(tables)):
        parts = re.split(r"^dense, (?=\D)|\.\.\.|\d[\dx.:]*|\bX\b|,? ?hopper|qkv_proj|^sparsegpt|^magnitude", quoted)
        if max(parts, key=len).strip(" ;:,") not in source:
            missing.append(quoted)
    assert not missing


def test_the_first_release_has_its_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[:2] == ["Unreleased", __version__]
    assert not re.search(r"\bus\b|microsecond", text.partition("## 0.2.0")[2])


# -- language ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)", path.read_text()):
        page = path.parent / target if target else path
        assert target.startswith("http") or page.suffix != ".md" or anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Those of a page's headings that GitHub and MkDocs give alike: a dash between spaces makes two."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", text)).strip().lower() for text in headings]
    return {text.replace(" ", "-") for text in plain if "  " not in text}


@pytest.mark.parametrize("path", [*PAGES, INDEX["INDEX"]], ids=name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [row.count("|") for row in table.splitlines()]
        assert len(set(cells)) == 1, table


@pytest.mark.parametrize("path", [path for path in PAGES if path not in DRAWN], ids=name)
def test_prose_is_readable(path: Path) -> None:
    text = path.read_text()
    for line in text.splitlines():
        assert line.startswith("|") or len(line) <= 200, line
    for block in prose(text):
        assert not re.search(r"\bbehind\b", block), block
        plain = re.sub(r"\]\([^)]*\)", "]", block)
        for sentence in re.split(r"(?<=[.!?])\**\s+(?=[A-Z`*\[(\d])|(?<=[:;])\s", plain):
            assert len(sentence.split()) <= WORDS, sentence


def test_short_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
    assert len((ROOT / "docs/measured.md").read_text().splitlines()) <= 120


def test_the_demonstration_is_that_of_the_record() -> None:
    rows: list[dict[str, Any]] = json.loads((ROOT / "results/demo/minilm.json").read_text())["rows"]
    assert all(row["exact"] for row in rows if row["dtype"] == "int8"), "the pages say: every bit"
