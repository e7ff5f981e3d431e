#!/usr/bin/env python3
"""Put vLLM's Python into this environment: no compiled parts, no GPU, and few of its dependencies.

    python tests/integrations/fetch_vllm.py [VERSION]

What a released wheel holds of Python is what a user's vLLM runs, so tests against it test the real classes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.22.1"

DEPENDENCIES = (
    *("aiohttp", "cachetools", "cbor2", "cloudpickle", "compressed-tensors", "dill", "einops", "gguf", "loguru"),
    *("msgspec", "openai", "openai-harmony", "opentelemetry-api", "prometheus-client", "psutil", "py-cpuinfo"),
    *("pybase64", "pydantic", "pyzmq", "regex", "requests", "sentencepiece", "uvloop"),
)
"""What is imported on the way to its quantisation configs and linear layers."""


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else VERSION
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", *DEPENDENCIES], check=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel_only = ["download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*pip, *wheel_only, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
            archive.extractall(sysconfig.get_path("purelib"), wanted)
    print(f"vLLM {version}: {len(wanted)} files")


if __name__ == "__main__":
    main()
