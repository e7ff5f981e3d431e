#!/usr/bin/env python3
"""Run the tests of lm-evaluation-harness with the real one, in an environment of its own.

python tests/evaluation_harness/try_lm_eval.py
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

PACKAGES = ("lm_eval[api]==0.4.13",)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder, "environment"))
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "-c", str(HERE.parents[1] / "constraints.txt"), *PACKAGES], check=True)
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path(folder, "cache"))}
        run = subprocess.run(
            [python, "-m", "pytest", "-q", "-m", "not gpu", HERE],
            env=os.environ | offline | {"LM_EVAL_MUST_BE_THERE": "1"},
        )
    raise SystemExit(run.returncode)


if __name__ == "__main__":
    main()
