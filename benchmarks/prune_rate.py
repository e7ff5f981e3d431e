"""How fast ``slidesparse prune`` is by magnitude to INT8, against reading and writing the same files and nothing else.

    python benchmarks/prune_rate.py [--folder FOLDER] [--gb 1.5] [--processes 1 2] [--out results/prune-rate.jsonl]

The checkpoint has Llama's shapes and BF16 weights, in shards. Both ways read a source that is not in the system's
cache, and write as many bytes, by the same reader and writer, to the disk: every file is flushed before the time ends.
Starting Python is left out; what prune does before it reads a weight is measured apart. The ways take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu import cpu_name

from slidesparse.base.dealing import deal
from slidesparse.base.ranks import joined
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.files.json_files import write_json
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.plan import plan
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions

SHAPES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
LAYER_BYTES = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11008)
OPTIONS = PruneOptions("6:8", "int8")


def make(folder: Path, layers: int) -> None:
    """A checkpoint of one shard a layer."""
    import transformers

    folder.mkdir(parents=True)
    config = transformers.LlamaConfig(**SHAPES, num_hidden_layers=layers, vocab_size=512, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    write_json(folder / "config.json", config.to_dict())
    with torch.device("meta"):
        parameters = dict(transformers.LlamaForCausalLM(config).named_parameters())
    shards: dict[str, dict[str, Stored]] = {}
    for name, parameter in parameters.items():
        number = name.split(".")[2] if ".layers." in name else "0"
        shards.setdefault(f"model-{number}.safetensors", {})[name] = Stored("BF16", tuple(parameter.shape))
    for shard, tensors in shards.items():
        with TensorWriter(folder / shard, tensors) as writer:
            for name, stored in tensors.items():
                writer.write(name, torch.randn(stored.shape, dtype=torch.bfloat16) * 0.02)
    index = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def forget(folder: Path) -> None:
    """Drop a folder's files from the system's cache."""
    os.sync()
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def files_alone(source: Path, destination: Path) -> None:
    """Read every tensor, and write as many bytes as prune does, in the shards that this process prunes."""
    with joined() as ranks:
        checkpoint = Checkpoint(source)
        outputs = {
            name: {tensor: Stored("I8", stored.shape) for tensor, stored in shard.items()}
            for name, shard in checkpoint.shards.items()
        }
        destination.mkdir(exist_ok=True)
        sizes = {name: sum(stored.n_bytes for stored in shard.values()) for name, shard in outputs.items()}
        for name in deal(sizes, ranks.world)[ranks.rank]:
            with TensorWriter(destination / name, outputs[name]) as writer:
                for tensor, stored in outputs[name].items():
                    data = checkpoint.tensor(tensor).view(-1).view(torch.uint8)
                    int(data[::4096].sum())  # a byte of every page: the pages are mapped, not read, until then
                    writer.write(tensor, data[: stored.n_bytes].view(torch.int8).view(stored.shape))
        ranks.wait()


def pruning(source: Path, destination: Path) -> None:
    """What ``slidesparse prune`` does."""
    with joined() as ranks:
        prune_checkpoint(source, destination, OPTIONS, progress=False, ranks=ranks)


def preparing(source: Path, destination: Path) -> None:
    """What it does before it reads a weight, which does not grow with the weights."""
    plan(Checkpoint(source), OPTIONS)


def run(work: Callable[[Path, Path], None], source: Path, destination: Path, rank: int, world: int, port: int) -> None:
    """One process."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // world, 1))
    before = time.process_time()
    work(source, destination)
    (source.parent / f"used{rank}").write_text(str(time.process_time() - before))


def seconds(work: Callable[[Path, Path], None], source: Path, destination: Path, world: int) -> tuple[float, float]:
    """Wall seconds of ``world`` processes, and of all their processors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cpu", "slidesparse.offline.prune", "transformers.models.llama.modeling_llama"])
    forget(source)
    begin = time.perf_counter()
    arguments = [(work, source, destination, rank, world, 29611 + world) for rank in range(world)]
    processes = [context.Process(target=run, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed")
    wall = time.perf_counter() - begin
    return wall, sum(float((source.parent / f"used{rank}").read_text()) for rank in range(world))


def measure(folder: Path, world: int, rounds: int) -> dict[str, Any]:
    """Medians of turns."""
    source, found = folder / "m", {"files": [], "prune": [], "prepare": []}
    cpu: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, work in (("files", files_alone), ("prune", pruning), ("prepare", preparing)):
            wall, used = seconds(work, source, folder / "s", world)
            found[name].append(wall)
            cpu[name].append(used)
            subprocess.run(["rm", "-rf", str(folder / "s")], check=True)
    read = Checkpoint(source).n_bytes
    files, prune = median(found["files"]), median(found["prune"])
    begin = median(found["prepare"])
    return {
        "processes": world,
        "read_gb": read / 1e9,
        "written_gb": read / 2e9,
        "seconds": found,
        "processor_seconds": cpu,
        "files_gb_s": read / 1e9 / files,
        "prune_gb_s": read / 1e9 / prune,
        "prune_gb_s_after_preparing": read / 1e9 / (prune - begin),
        "share": files / prune,
        "share_after_preparing": files / (prune - begin),
    }


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the system's temporary one)")
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        make(Path(name) / "m", max(round(options.gb * 1e9 / LAYER_BYTES), 1))
        seconds(preparing, Path(name) / "m", Path(name), 1)  # starts the server
        measured = [measure(Path(name), world, options.rounds) for world in options.processes]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    written = datetime.now(timezone.utc).isoformat(timespec="seconds")
    cores = len(os.sched_getaffinity(0))
    about = {"benchmark": "prune-rate", "written": written, "commit": commit, "cpu": cpu_name(), "cores": cores}
    for one in measured:
        print(json.dumps(one))
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**about, "torch": torch.__version__, **one}) + "\n" for one in measured)


if __name__ == "__main__":
    main()
