#!/usr/bin/env bash
# Install slidesparse next to vLLM, and change the version of nothing that is there: a package that would have to change is
# an error of pip's.
set -euo pipefail
cd "$(dirname "$0")/.."
present=$(mktemp)
trap 'rm -f "$present"' EXIT
python3 -m pip list --format=freeze > "$present"
python3 -m pip install --no-cache-dir -c "$present" ".[cuda]"
python3 - <<'PYTHON'
from importlib.metadata import entry_points

(plugin,) = entry_points(group="vllm.general_plugins", name="slidesparse")
print(f"vLLM will load {plugin.value}")
PYTHON
slidesparse info
