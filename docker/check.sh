#!/usr/bin/env bash
# Run the Dockerfile's RUN steps in this environment, which has the Python of its vLLM, without docker. Not checked here: that
# the image exists, that its pip may write, its compiled parts, a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 tests/integrations/fetch_vllm.py "$(sed -n 's/^ARG VLLM=//p' Dockerfile)"
before=$(python3 -m pip list --format=freeze | grep -v '^slidesparse==' | sort)
sed -n 's/^RUN //p' Dockerfile | bash -ex
after=$(python3 -m pip list --format=freeze | sort)
changed=$(comm -23 <(echo "$before") <(echo "$after"))
[ -z "$changed" ] || { echo "installing slidesparse changed: $changed" >&2; exit 1; }
