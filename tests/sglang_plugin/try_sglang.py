#!/usr/bin/env python3
"""Run the SGLang plugin's tests inside SGLang's Python, in an environment of its own.

python tests/sglang_plugin/try_sglang.py [VERSION ...]
python tests/sglang_plugin/try_sglang.py fetch VERSION     # put it into this environment instead
"""

from __future__ import annotations

import sys
from pathlib import Path

from slidesparse.integrations.sglang import TESTED

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integrations"))

from fetch_vllm import fetch  # noqa: E402 # after its folder is on the path
from try_vllm import passes  # noqa: E402

DEPENDENCIES = (
    *("aiohttp", "apache-tvm-ffi", "compressed-tensors", "dill", "einops", "fastapi", "gguf", "ipython", "msgspec"),
    *("openai", "orjson", "partial-json-parser", "prometheus-client", "psutil", "pybase64", "pyzmq", "requests"),
    *("sentencepiece", "setproctitle", "traitlets", "transformers", "uvloop"),
)
"""What SGLang imports on the way to its quantisation configs, linear layers and mixtures."""

OLDER = ("xgrammar",)
"""And what older releases do."""


def main() -> None:
    if sys.argv[1:2] == ["fetch"]:
        needed = DEPENDENCIES if sys.argv[2] == TESTED[-1] else DEPENDENCIES + OLDER
        fetch("sglang", sys.argv[2], needed, lambda name: not name.endswith(".so"))  # it looks for its sources
        return
    for version in sys.argv[1:] or TESTED[-1:]:
        if not passes(HERE, [__file__, "fetch", version], SGLANG_MUST_BE_THERE="1"):
            raise SystemExit(f"failed in SGLang {version}")


if __name__ == "__main__":
    main()
