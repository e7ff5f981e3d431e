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
import venv
from collections.abc import Sequence
from pathlib import Path

from slidesparse.integrations.vllm.releases import TESTED

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"


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


def passes(tests: Path, fill: Sequence[str | Path], **settings: str) -> bool:
    """Whether tests pass in an environment that arguments of its Python fill, under settings of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder, "environment"))
        subprocess.run([python, *fill], check=True)
        run = [python, "-m", "pytest", "-q", "-m", "not gpu", "--tb=short", tests]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path(folder, "cache"))}
        return subprocess.run(run, env=os.environ | offline | settings).returncode == 0


def install(packages: Sequence[str], *how: str) -> list[str | Path]:
    """Arguments of Python that install packages."""
    return ["-m", "pip", "--disable-pip-version-check", "install", "-q", *how, "-c", CONSTRAINTS, *packages]


def main() -> None:
    newest = find_newest()
    failed = []
    for version in [newest if name == "newest" else name for name in sys.argv[1:]] or TESTED:
        if not passes(HERE, [HERE / "fetch_vllm.py", version]):
            failed.append(version)
    if newest not in TESTED:
        print(f"vLLM {newest} is out and not among the tested releases: CONTRIBUTING.md says how to add it")
    raise SystemExit(f"failed in vLLM {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
