#!/usr/bin/env python3
"""Put vLLM's Python into this environment: no compiled parts, no GPU, and few of its dependencies.

    python tests/integrations/fetch_vllm.py VERSION

What a released wheel holds of Python is what a user's vLLM runs, so tests against it test the real classes.
Dependencies are installed in the versions that this release asks for; torch is left as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

DEPENDENCIES = (
    *("aiohttp", "cachetools", "cbor2", "cloudpickle", "compressed-tensors", "dill", "einops", "fastapi", "gguf"),
    *("llguidance", "loguru", "msgspec", "openai", "openai-harmony", "opentelemetry-api", "orjson"),
    *("partial-json-parser", "prometheus-client", "psutil", "py-cpuinfo", "pybase64", "pydantic", "pyzmq", "regex"),
    *("requests", "sentencepiece", "starlette", "transformers", "uvloop", "xgrammar"),
)
"""What some release imports on the way to its quantisation configs, linear layers and models."""


def canonical(name: str) -> str:
    """A package's name as indexes compare it.

    >>> canonical("Prometheus_Client")
    'prometheus-client'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(metadata: str, dependencies: Iterable[str] = DEPENDENCIES) -> list[str]:
    """What to install: the dependencies, bounded as a release's metadata bounds them.

    >>> requirements("Requires-Dist: compressed-tensors==0.15.0.1\\nRequires-Dist: torch==2.11.0")[4]
    'compressed-tensors==0.15.0.1'
    """
    wanted = {name: name for name in dependencies}
    for line in re.findall(r"^Requires-Dist: ([^;\n]+)", metadata, re.MULTILINE):
        name, bounds = re.fullmatch(r"([\w.-]+)(?:\[.*?\])?\s*(.*?)\s*", line).groups()  # type: ignore[union-attr]
        if canonical(name) in wanted:
            wanted[canonical(name)] = canonical(name) + bounds
    return list(wanted.values())


def is_python(name: str) -> bool:
    """Whether a file of a wheel is Python, or what Python reads of itself."""
    return name.endswith((".py", ".json")) or ".dist-info/" in name


def fetch(package: str, version: str, dependencies: Iterable[str], keep: Callable[[str], bool] = is_python) -> None:
    """Install dependencies, and the files of a release's wheel that are to be kept."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        wheel_only = ["download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*pip, *wheel_only, f"{package}=={version}"], check=True)
        (wheel,) = Path(folder).glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            needed = requirements(archive.read(metadata).decode(), dependencies)
            subprocess.run([*pip, "install", "-q", *needed], check=True)
            wanted = [name for name in names if keep(name)]
            archive.extractall(sysconfig.get_path("purelib"), wanted)
    print(f"{package} {version}: {len(wanted)} files")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    fetch("vllm", sys.argv[1], DEPENDENCIES)


if __name__ == "__main__":
    main()
