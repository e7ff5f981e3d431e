#!/usr/bin/env python3
"""Run the tests of lm-evaluation-harness with the real one, in an environment of its own.

python tests/evaluation_harness/try_lm_eval.py
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integrations"))

from try_vllm import install, passes  # noqa: E402 # after its folder is on the path

PACKAGES = ("lm_eval[api]==0.4.13",)

if __name__ == "__main__":
    raise SystemExit(not passes(HERE, install(PACKAGES), LM_EVAL_MUST_BE_THERE="1"))
