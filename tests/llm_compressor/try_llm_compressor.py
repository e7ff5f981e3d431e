#!/usr/bin/env python3
"""Run the tests of what llm-compressor makes, with the real llm-compressor, in an environment of its own.

python tests/llm_compressor/try_llm_compressor.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integrations"))

from try_vllm import make_environment  # noqa: E402 # after its folder is on the path

PACKAGES = (
    *("llmcompressor==0.14.0.1", "compressed-tensors", "loguru", "datasets", "accelerate", "pyarrow", "pandas", "dill"),
    *("multiprocess", "xxhash", "fsspec", "psutil", "requests", "urllib3", "certifi", "charset-normalizer", "idna"),
    *("python-dateutil", "six", "nvidia-ml-py", "pyyaml", "tqdm", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "auto-round"),
)
"""What it imports on the way to ``oneshot``. Each without its own requirements: among them is another torch."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder))
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "-c", str(HERE.parents[1] / "constraints.txt"), *PACKAGES], check=True)
        run = subprocess.run(
            [python, "-m", "pytest", "-q", "-m", "not gpu", HERE],
            env=os.environ | {"LLM_COMPRESSOR_MUST_BE_THERE": "1"},
        )
    raise SystemExit(run.returncode)


if __name__ == "__main__":
    main()
