"""Damaged checkpoints, texts and arguments by number, and the oracle that judges what a command makes of them.

``python tests/fuzzed.py --seconds 3600 --start 100000`` tries as many as fit into an hour, from case 100000 on, and
prints those at which the oracle complains; a number printed here is tried again by ``--start NUMBER --cases 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoints import add_tokenizer, make_checkpoint, tokens, write_text
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.cli import main
from slidesparse.commands.inspect import inspect_checkpoint
from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.files.packed_file import FILE_NAME, write_packed

LONGEST_S = 60
"""Seconds after which a command hangs; they take less than one."""

VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "6:8", "dense", "int8", "BF16", "\u2028", "a" * 1000, [], [1], ["a"], [[[]]], {}, {"a": 1}),
]
KEYS = ["extra", "num_hidden_layers", "quantization_config", "slidesparse_config", "architectures", "vocab_size"]
WORDS = [
    *("", "-1", "0", "9" * 400, "x", "6_8", "nan", "1e999", "\udce9", "a\nb", "re:(", "re:.*", "/dev/null", ".", ".."),
    *("dense", "text.txt", "quantised", "--json", "-v", "-q", "--lm-head"),
]
DTYPES = [torch.float32, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.bool]
CALIBRATION = ["--calibration", "text.txt", "--samples", "1", "--length", "16"]


def make_sources(folder: Path) -> Path:
    """Write the checkpoints that are damaged, and a text."""
    make_checkpoint(folder / "dense", num_hidden_layers=1)
    add_tokenizer(folder / "dense")
    write_text(folder / "text.txt", words=40)
    prune_checkpoint(folder / "dense", folder / "partial", PruneOptions("4:6@50%", "int8"))
    write_packed(folder / "partial")
    prune_checkpoint(folder / "dense", folder / "uniform", PruneOptions("6:8", "fp8"))
    prune_checkpoint(folder / "dense", folder / "quantised", PruneOptions("dense", "int8"))
    config = json.loads((folder / "quantised/config.json").read_text())
    del config["slidesparse_config"]
    (folder / "quantised/config.json").write_text(json.dumps(config))
    return folder


# -- damage --------------------------------------------------------------------------------------------------------


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value inside a JSON value."""
    if here:
        yield here
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*here, key))


def damage_json(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 1, 2, 3])):
        found = list(places(value))
        if not found:
            return value
        *outer, key = rng.choice(found)
        at = value
        for step in outer:
            at = at[step]
        chance = rng.random()
        if chance < 0.2:
            del at[key]
        elif chance < 0.3 and isinstance(at, dict):
            at[rng.choice(KEYS)] = rng.choice(VALUES)
        else:
            at[key] = rng.choice(VALUES)
    return value


def damage_config(folder: Path, rng: random.Random) -> None:
    names = ["config.json"] * 4 + ["generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    path = folder / rng.choice(names)
    if path.exists():
        path.write_text(json.dumps(damage_json(json.loads(path.read_text()), rng)))


def damage_tensors(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        kind = rng.choice(["remove", "retype", "shorten", "transpose", "spoil", "negate", "clear", "add"])
        if kind == "remove":
            del tensors[name]
        elif kind == "retype":
            tensors[name] = tensor.float().to(rng.choice(DTYPES))
        elif kind == "shorten":
            tensors[name] = tensor[:-1].contiguous()
        elif kind == "transpose":
            tensors[name] = tensor.mT.contiguous() if tensor.dim() == 2 else tensor[None].contiguous()
        elif kind == "spoil" and tensor.is_floating_point():
            wide = tensor.float()
            wide.view(-1)[rng.randrange(wide.numel())] = rng.choice([float("nan"), float("inf")])
            tensors[name] = wide.to(tensor.dtype)
        elif kind == "negate":
            tensors[name] = (-tensor.float()).to(tensor.dtype)
        elif kind == "clear":
            tensors[name] = torch.zeros_like(tensor)
        elif kind == "add":
            tensors[f"{name}{rng.choice(['_scale', '.x', '2'])}"] = torch.ones(3)
    save_file(tensors, path, {"format": "pt"})


def damage_bytes(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    at = rng.randrange(min(len(content), 4000))
    chance = rng.random()
    if chance < 0.4:
        content[at] ^= 1 << rng.randrange(8)
    elif chance < 0.7:
        del content[rng.randrange(len(content)) :]
    else:
        content[at:at] = rng.randbytes(rng.randrange(1, 9))
    path.write_bytes(content)


def damage_packed(folder: Path, rng: random.Random) -> None:
    path = folder / FILE_NAME
    if path.exists():
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(damage_json(json.loads(content[8 : 8 + length]), rng)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


DAMAGES = [damage_config, damage_config, damage_tensors, damage_tensors, damage_bytes, damage_packed]


# -- commands ------------------------------------------------------------------------------------------------------


def choose_command(rng: random.Random) -> list[str]:
    pattern = rng.choice(["6:8", "4:6@50%", "dense"])
    dtype = rng.choice([[], ["--dtype", "int8"], ["--dtype", "fp8"], ["--dtype", "bf16"]])
    method = rng.choice([[], [], ["--method", "wanda", *CALIBRATION]])
    plan = ["plan", "m", "--out", "plan.json", "--speedup", "1.05", "--patterns", "6:8", "--method", "wanda"]
    return rng.choice(
        [
            ["inspect", "m"],
            ["pack", "m"],
            ["eval", "m", "--text", "text.txt", "--window", "32"],
            [*plan, *CALIBRATION],
            ["prune", "m", "out", "--pattern", pattern, *dtype, *method],
            ["prune", "m", "out", "--pattern", pattern, *dtype, *method],
        ]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder; ``contextlib`` can do so from Python 3.11 on."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError in a block that takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def complaint(sources: Path, work: Path, number: int) -> str | None:
    """Run one case in an empty folder; return what is wrong with the outcome, or None."""
    rng = random.Random(number)
    source = rng.choice(["dense", "dense", "partial", "partial", "uniform", "quantised"])
    shutil.copytree(sources / source, work / "m")
    shutil.copy(sources / "text.txt", work)
    command = choose_command(rng)
    if rng.random() < 0.15:
        for _ in range(2):
            command[rng.randrange(1, len(command))] = rng.choice(WORDS)
    else:
        rng.choice(DAMAGES)(work / "m", rng)
    if command[0] == "pack" and rng.random() < 0.7:
        (work / "m" / FILE_NAME).unlink(missing_ok=True)
    before = contents(work)
    out, err = io.StringIO(), io.StringIO()
    try:
        with inside(work), limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(command)
    except SystemExit as stop:
        status = int(str(stop.code))
    except BaseException:
        return f"{command}: {traceback.format_exc()}"
    wrong = _judge(command, status, out.getvalue(), err.getvalue(), before, work)
    return wrong and f"{number}, {source}, {command}: {wrong}"


def _judge(command: list[str], status: int, out: str, err: str, before: dict[str, bytes], work: Path) -> str | None:
    after = contents(work)
    if "unexpected error" in err:
        return err
    if any(after.get(name) != content for name, content in before.items()):
        return "a file that was there has changed"
    if status == 0:
        return _verify(command, work) if command[1:3] == ["m", "out"] or command[:2] == ["pack", "m"] else None
    if status == 1 and command[0] != "inspect" and (out == "") and err.count("\n") != 1:
        return f"not one line: {err!r}"
    finished = [name for name in after if name not in before and not name.split("/")[0].endswith(".partial")]
    allowed = {"plan.sensitivities.jsonl"}
    return f"left {finished}" if set(finished) - allowed else None


def _verify(command: list[str], work: Path) -> str | None:
    """What a command calls success can be loaded and run."""
    folder = work / "out" if command[0] == "prune" else work / "m"
    try:
        if not inspect_checkpoint(folder).ok:
            return "inspect finds a fault in the result"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that the model does not use
            answer = slidesparse.load(folder)(tokens()).logits
    except Exception:
        return f"the result cannot be used: {traceback.format_exc()}"
    return None if bool(torch.isfinite(answer).all()) else "the result answers with NaN"


def run_cases(numbers: Iterator[int] | range, sources: Path) -> Iterator[str]:
    """Yield the complaints about some cases."""
    for number in numbers:
        with tempfile.TemporaryDirectory() as work:
            found = complaint(sources, Path(work), number)
        if found is not None:
            yield found


def by_hand() -> None:
    """Try many cases, as the first lines of this file say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tried = []

    def numbers() -> Iterator[int]:
        for number in range(options.start, options.start + options.cases):
            if time.monotonic() > end:
                return
            tried.append(number)
            yield number

    with tempfile.TemporaryDirectory() as folder:
        for found in run_cases(numbers(), make_sources(Path(folder))):
            print(found, flush=True)
    print(f"{len(tried)} cases, the last {tried[-1] if tried else '-'}")


if __name__ == "__main__":
    by_hand()
