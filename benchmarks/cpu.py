"""Speed of packing and of ``slidesparse prune`` on a CPU, and the memory that pruning takes.

    python benchmarks/cpu.py [--record results/cpu.jsonl]

Packs a 4096x14336 INT8 weight at 6:8, and prunes a random checkpoint of Llama-3.2-1B's shapes (BF16, 1.24 B parameters)
to 6:8 INT8 in a process of its own, whose peak resident memory is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig

from slidesparse.files.json_files import write_json
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import pack_by

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def random_checkpoint(path: Path, **shapes: object) -> int:
    """Write a BF16 Llama checkpoint of Gaussian weights, tensor by tensor; returns its bytes."""
    path.mkdir(parents=True)
    config = LlamaConfig(**shapes, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    write_json(path / "config.json", config.to_dict())
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    stored = {name: Stored("BF16", tuple(p.shape)) for name, p in parameters.items()}
    with TensorWriter(path / "model.safetensors", stored) as writer:
        for name, entry in stored.items():
            writer.write(name, torch.randn(entry.shape, dtype=torch.bfloat16) * 0.02)
    return sum(entry.n_bytes for entry in stored.values())


def cpu_name() -> str:
    """As /proc/cpuinfo has it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def pack_seconds(repeats: int = 5) -> list[float]:
    """Times to pack a 4096x14336 INT8 weight; the first includes the first touch of fresh memory."""
    weight = torch.randint(-127, 128, (4096, 14336), dtype=torch.int8)
    weight *= prune_mask(weight, "6:8")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        pack_by(weight, "6:8")
        times.append(time.perf_counter() - start)
    return times


def prune_seconds_and_peak(source: Path, destination: Path) -> tuple[float, float]:
    """Wall time of ``slidesparse prune`` with start-up, and its peak resident memory in GB."""
    arguments = [str(source), str(destination), "--pattern", "6:8", "--method", "magnitude"]
    code = "from slidesparse.cli import main; main(); print(open('/proc/self/status').read())"
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code, "prune", *arguments], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    (peak_kb,) = re.findall(r"VmHWM:\s+(\d+)", run.stdout)
    return seconds, int(peak_kb) * 1024 / 1e9


def main() -> None:
    """Measure, print, and append the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    record_path = parser.parse_args().record
    times = pack_seconds()
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder) / "dense", Path(folder) / "sparse"
        n_bytes = random_checkpoint(source, **LLAMA_1B)
        seconds, peak_gb = prune_seconds_and_peak(source, destination)
    record = {
        "benchmark": "cpu",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pack_4096x14336_int8_s": {"first": times[0], "median": median(times), "all": times},
        "prune_1b": {"source_gb": n_bytes / 1e9, "seconds": seconds, "peak_gb": peak_gb},
    }
    print(f"pack 4096x14336 INT8 at 6:8   first {times[0]:.2f} s, median {median(times):.2f} s")
    print(f"prune {n_bytes / 1e9:.2f} GB at 6:8 INT8       {seconds:.1f} s, peak memory {peak_gb:.2f} GB")
    if record_path:
        record_path.parent.mkdir(parents=True, exist_ok=True)
        with open(record_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
