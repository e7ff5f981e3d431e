"""What measuring on the spot costs a start of vLLM, and what the log says of it.

    python benchmarks/first_start.py SCRATCH [--model Qwen2.5-7B] [--dtype int8] [--pattern 6:8] [--layers N] [--gpus 2]

Each part is a start of an engine in a process of its own, on one checkpoint: stock; ours with a backend named, which
compiles the kernels; without measuring; the first start that measures; the next one; one with a damaged cache; one with
a cache that cannot be written. vLLM's own cache of compiled graphs is off, so that all of them compile. The seconds are
those of ``LLM(...)``; the memory for keys and values, as vLLM says it, shows what a start leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEPT = re.compile(r"slidesparse|KV cache|error", re.IGNORECASE)


def start(arguments: dict[str, Any]) -> None:
    """Start one engine and say how long that took."""
    import vllm

    began = time.perf_counter()
    llm = vllm.LLM(**arguments)
    print(f"STARTED {time.perf_counter() - began:.1f}", flush=True)
    llm.generate([{"prompt_token_ids": list(range(100, 164))}], vllm.SamplingParams(max_tokens=8, temperature=0.0))


def run(name: str, arguments: dict[str, Any], cache: Path) -> None:
    """Start an engine in a process of its own, and print its seconds and its lines."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "VLLM_DISABLE_COMPILE_CACHE": "1"}
    command = [sys.executable, __file__, "--start", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started = re.search(r"^STARTED (.*)$", done.stdout, re.MULTILINE)
    print(f"\n== {name}: {started[1] if started else 'no'} s, exit status {done.returncode}")
    print("\n".join(line for line in done.stdout.splitlines() if KEPT.search(line)), flush=True)


def main() -> None:
    """Make the checkpoint, and run all starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    for option, default in (("model", "Qwen2.5-7B"), ("dtype", "int8"), ("pattern", "6:8")):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()

    import torch

    from slidesparse.weights.pattern import Pattern
    from slidesparse.weights.quant import parse_dtype
    from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint

    folder = options.scratch / f"{options.model}-{options.pattern.replace(':', 'of')}-{options.dtype}"
    if not folder.exists():
        config = model_config(options.model, options.layers)
        pattern = Pattern.parse(options.pattern)
        write_checkpoint(folder, config, parse_dtype(options.dtype), pattern, torch.device("cuda"))
        torch.cuda.empty_cache()
    common = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 256,
        "tensor_parallel_size": options.gpus,
    }
    caches = [options.scratch / f"cache-{name}" for name in ("kept", "damaged", "unwritable")]
    kept, damaged, unwritable = caches
    if any(cache.exists() for cache in caches):
        sys.exit(f"delete {options.scratch}/cache-* first: they hold times")
    run("stock", common | {"quantization": "compressed-tensors"}, kept)
    run("kernels compiled", common | {"additional_config": {"slidesparse": {"backend": "hopper"}}}, kept)
    run("without measuring", common | {"additional_config": {"slidesparse": {"tune": "off"}}}, kept)
    run("first start", common, kept)
    (table,) = (kept / "slidesparse").glob("speed-*.json")
    run("second start", common, kept)
    (damaged / "slidesparse").mkdir(parents=True)
    (damaged / "slidesparse" / table.name).write_text(table.read_text()[:100])
    run("damaged cache", common, damaged)
    unwritable.write_text("a file where the folder would be: root may write into any folder")
    run("cache that cannot be written", common, unwritable)


if __name__ == "__main__":
    if sys.argv[1] == "--start":
        start(json.loads(sys.argv[2]))
    else:
        main()
