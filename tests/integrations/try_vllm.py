#!/usr/bin/env python3
"""Run the plugin's tests inside the Python of several releases of vLLM, each in an environment of its own.

    python tests/integrations/try_vllm.py                # the tested releases, as CI does
    python tests/integrations/try_vllm.py newest         # the newest of the index, and what breaks in it
    python tests/integrations/try_vllm.py 0.28.0 0.31.0

An environment sees the packages of the one that runs this, and has the dependencies of its release before them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from slidesparse.integrations.vllm.releases import TESTED

HERE = Path(__file__).parent

AT_ONCE = 2
"""Releases that are tried at a time; their tests run in one process each."""


class Result(NamedTuple):
    """What became of one release: how many tests ran, cause -> how many broke by it, and the seconds it took."""

    tests: int
    broken: Counter[str]
    seconds: float


def find_newest() -> str:
    """The newest release of the index."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    text = subprocess.run([*pip, "index", "versions", "vllm"], check=True, capture_output=True, text=True).stdout
    return read_newest(text)


def read_newest(text: str) -> str:
    """The newest of what pip lists.

    >>> read_newest("vllm (0.33.0)\\nAvailable versions: 0.33.0, 0.32.0")
    '0.33.0'
    """
    found = re.match(r"vllm \((.+?)\)", text)
    if found is None:
        raise SystemExit(f"pip names no release of vLLM: {text!r}")
    return found[1]


def make_environment(folder: Path) -> Path:
    """Make an environment on top of this one, and return its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        with (packages / "below.pth").open("a") as file:
            file.write(f"import site; site.addsitedir({place!r})\n")
    return python


def read_report(report: Path) -> tuple[int, Counter[str]]:
    """How many tests a JUnit report of pytest's names, and what broke how many of them: the messages' first lines."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    faults = [fault for case in cases for fault in (*case.iter("failure"), *case.iter("error"))]
    return len(cases), Counter((fault.get("message") or "").partition("\n")[0][:200] for fault in faults)


def try_release(version: str, folder: Path) -> Result:
    """Fetch a release, run the tests in it, and print what they said when they are through."""
    start = time.monotonic()
    python, report = make_environment(folder), folder / "report.xml"
    fetch = subprocess.run([python, HERE / "fetch_vllm.py", version], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(fetch.stdout.decode(errors="replace"), end="", flush=True)
    fetch.check_returncode()
    arguments = ["-q", "-m", "not gpu", "--tb=short", f"--junitxml={report}", HERE]
    command, environment = [python, "-m", "pytest", *arguments], os.environ | {"HF_HUB_OFFLINE": "1"}
    tests_run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(tests_run.stdout.decode(errors="replace"), flush=True)
    code = tests_run.returncode
    tests, broken = read_report(report)
    if code != 0 and not broken:
        broken[f"pytest ended with status {code}"] = 1
    return Result(tests, broken, time.monotonic() - start)


def describe(version: str, result: Result) -> str:
    """Lines on one release."""
    head = f"vLLM {version}: {result.tests} tests, {result.broken.total()} broken, {result.seconds:.0f} s"
    return "\n".join([head, *(f"  {count} x {why}" for why, count in result.broken.most_common())])


def main() -> None:
    newest = find_newest()
    asked = [newest if name == "newest" else name for name in sys.argv[1:]] or list(TESTED)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        tried = pool.map(lambda version: try_release(version, Path(folder, version)), asked)
        results = dict(zip(asked, tried, strict=True))
    print("", *(describe(version, result) for version, result in results.items()), sep="\n")
    if newest not in TESTED:
        print(f"vLLM {newest} is out and not among the tested releases: CONTRIBUTING.md says how to add it")
    if any(result.broken or not result.tests for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
