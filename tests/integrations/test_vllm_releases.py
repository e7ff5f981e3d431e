"""The tested releases of vLLM, which pages, extras and CI name too, and the commands that try releases."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import ModuleType

import fetch_vllm
import pytest
import try_vllm
from packaging.specifiers import SpecifierSet

from slidesparse.integrations.vllm.releases import TESTED, is_newer, is_older, parse_version

ROOT = Path(__file__).parents[2]


def test_each_tested_release_is_inside_the_range_and_they_are_in_order() -> None:
    assert not any(is_older(release) or is_newer(release) for release in TESTED)
    assert [*TESTED] == sorted(TESTED, key=parse_version)  # type: ignore[arg-type] # releases have numbers
    assert is_older("0.21.9")
    assert is_newer("1.0")


def test_pages_name_the_tested_releases() -> None:
    serving = (ROOT / "docs/serving.md").read_text()
    table = serving.partition("| vLLM | tested |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| (\d\S*) \|", table, re.MULTILINE)) == TESTED


def test_the_extra_takes_exactly_the_tested_range() -> None:
    """Read as text: Python 3.10 has no reader of TOML."""
    (extra,) = re.findall(r'^vllm = \[.*"vllm(\S+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    allowed, (major, minor) = SpecifierSet(extra), parse_version(TESTED[-1]) or (0, 0)
    assert [release for release in TESTED if release not in allowed] == []
    assert f"{major}.{minor}.9" in allowed  # patches of a tested release
    assert f"{major}.{minor + 1}.0" not in allowed
    assert "0.21.0" not in allowed


def test_the_image_is_of_a_tested_release_that_ran_on_a_gpu() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (release,) = re.findall(r"^ARG VLLM=(\S+)$", text, re.MULTILINE)
    assert "FROM vllm/vllm-openai:v${VLLM}\n" in text
    rows = dict(re.findall(r"^\| (\d\S*) \| (.*) \|$", (ROOT / "docs/serving.md").read_text(), re.MULTILINE))
    assert release == [version for version in TESTED if "H200" in rows[version]][-1]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("command", [fetch_vllm, try_vllm])
def test_examples_of_the_commands(command: ModuleType) -> None:
    found = doctest.testmod(command)
    assert found.attempted > 0
    assert found.failed == 0
