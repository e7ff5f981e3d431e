#!/usr/bin/env python3
"""Run the tests of what llm-compressor makes, with the real llm-compressor, in an environment of its own.

python tests/llm_compressor/try_llm_compressor.py
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integrations"))

from try_vllm import install, passes  # noqa: E402 # after its folder is on the path

PACKAGES = (
    *("llmcompressor==0.14.0.1", "compressed-tensors", "loguru", "datasets", "accelerate", "pyarrow", "pandas", "dill"),
    *("multiprocess", "xxhash", "fsspec", "psutil", "requests", "urllib3", "certifi", "charset-normalizer", "idna"),
    *("python-dateutil", "six", "nvidia-ml-py", "pyyaml", "tqdm", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "auto-round"),
)
"""What it imports on the way to ``oneshot``. Each without its own requirements: among them is another torch."""

if __name__ == "__main__":
    raise SystemExit(not passes(HERE, install(PACKAGES, "--no-deps"), LLM_COMPRESSOR_MUST_BE_THERE="1"))
