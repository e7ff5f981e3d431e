"""Random damage of files and random arguments, and what a command made of them: for ``test_fuzz.py``.

A case is plain data, so that one that was found is kept by writing it down. Numbers in it choose among what there is.
"""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.cli import build_parser

SOURCES = ("dense", "sharded", "w8a8", "pruned", "floats", "kept")
"""Folders of checkpoints: ``floats`` is pruned in a float type, and so is ``kept``, with the work of runs that ended
early; ``recover`` and ``chats`` go on from there, and that work is damaged in place of the folder."""

COMMANDS = ("inspect", "prune", "eval", "load", "recover", "chats")


@dataclass(frozen=True)
class Case:
    """One attempt.

    Attributes:
        command: What is run.
        source: The folder that it is run on, of ``SOURCES``.
        damages: What is done to the folder before: the name of a function below, and the number that chooses.
        arguments: The numbers that choose the arguments; none for the usual ones.
    """

    command: str
    source: str
    damages: tuple[tuple[str, int], ...] = ()
    arguments: tuple[int, ...] = ()


# -- files ---------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Files that are no links."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 8))):
        # Half of the flips in the header: that is where the structure is.
        place = rng.randrange(min(len(data), 400) if rng.random() < 0.5 else len(data))
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((0, 1, 7, 8, 9, path.stat().st_size // 2, max(path.stat().st_size - 1, 0))))


def grow(path: Path, rng: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(rng.choice((b"\0", b" ", b"}", b"\n{}\n", bytes(4096))))


def blank(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) + 1)
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((0, 1, 8, 100, 5000))))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def exchange(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice(files_of(path.parent)).read_bytes())


def folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice((path.name, "missing", "..", ".", "/dev/null", "/etc/hostname", "../text.txt")))


FILE_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    one.__name__: one for one in (flip, cut, grow, blank, noise, remove, exchange, folder, link)
}


# -- what the files say --------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 64, 0.5, -1e300, float("nan"), float("inf")),
    *("", "x", "../x", "\u2028", "re:(", "re:.*", "int8", "6:8", [], [0], ["x"], [None], {}, {"": 0}, {"x": {"x": []}}),
    *("\x1b[2J\x07\u202e", "a\0b", ["re:a{99999999999}"]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in inner for deeper in places(item, (*path, key)))]


def change_json(value: Any, rng: random.Random) -> Any:
    """Another value somewhere, or one that is gone, or a key that nobody knows."""
    path, other = rng.choice(places(value)[1:] or [()]), deepcopy(rng.choice(VALUES))  # else cases would share it
    if not path:
        return other
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    how = rng.randrange(6)
    if how == 0:
        del inside[path[-1]]
    elif how == 1 and isinstance(inside, dict):
        inside["unknown"] = other
    elif how == 2 and isinstance(inside[path[-1]], int):
        inside[path[-1]] += rng.choice((-1, 1))
    else:
        inside[path[-1]] = other
    return value


def json_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in files_of(folder) if path.suffix == ".json"])
    if path.name != "config.json" and rng.random() < 0.5:
        path = folder / "config.json"
    if path not in files_of(folder):
        return  # a link by now
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # damaged already
    path.write_text(json.dumps(change_json(value, rng)))


def nested(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in files_of(folder) if path.suffix == ".json"])
    text = rng.choice(
        ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, "1" * 5000, '{"a": 1, "a": 2}', "\ufeff{}")
    )
    path.write_text(text)


def header(folder: Path, rng: random.Random) -> None:
    """Change what a safetensors file says of its tensors, and leave the data as they are."""
    weights = [path for path in files_of(folder) if path.suffix == ".safetensors"]
    if not weights:
        return
    path = rng.choice(weights)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        value = json.loads(data[8:end])
    except (ValueError, RecursionError):
        return  # damaged already
    if rng.random() < 0.3 and isinstance(value, dict) and len(value) > 2:
        one, two = rng.sample(sorted(value), 2)
        value[one], value[two] = value[two], value[one]
    else:
        value = change_json(value, rng)
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


SETTINGS: tuple[dict[str, Any], ...] = (
    *({"num_beams": 4}, {"num_return_sequences": 3, "num_beams": 3}, {"penalty_alpha": 0.6}, {"max_length": 1}),
    *({"stop_strings": ["a"]}, {"min_length": 50}, {"forced_eos_token_id": 5}, {"bad_words_ids": [[5]]}),
    *({"eos_token_id": [2, 5]}, {"eos_token_id": list(range(96))}, {"eos_token_id": -1}, {"eos_token_id": [[2]]}),
    *({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}, {"custom_generate": "../text.txt"}),
)


def generation(folder: Path, rng: random.Random) -> None:
    """Let generation_config.json steer how a model draws, or where it ends."""
    path = folder / "generation_config.json"
    if not path.is_dir() and not path.is_symlink():
        path.write_text(json.dumps(dict.fromkeys(("temperature", "top_p"), rng.choice(VALUES)) | rng.choice(SETTINGS)))


FOLDER_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    one.__name__: one for one in (json_file, nested, header, generation)
}

DAMAGES = (*FILE_DAMAGES, *FOLDER_DAMAGES)


def damage(folder: Path, name: str, number: int) -> None:
    rng = random.Random(number)
    if name in FILE_DAMAGES:
        known = files_of(folder)
        if known:
            FILE_DAMAGES[name](rng.choice(known), rng)
    elif any(path.suffix == ".json" for path in files_of(folder)):
        FOLDER_DAMAGES[name](folder, rng)


def write_data(folder: Path, number: int) -> None:
    """Write chats, and a data set of several kinds of files, with odd values for some of their keys."""
    rng = random.Random(number)
    call = {"function": {"name": "add", "arguments": rng.choice(('{"a": 1}', "{", "[]"))}}
    lines = []
    for place in range(6):
        answer = {"role": "assistant", "content": "a number", "tool_calls": [call], "reasoning_content": "hm"}
        line = {
            "messages": [{"role": "user", "content": "what is two"}, answer],
            "tools": [],
            "tokens": [5],
            "seal": "",
        }
        lines.append(change_json(line, rng) if number and rng.random() < 0.3 else line | {"id": place})
    ends = ("\n", "\n", "\r\n", "\n\n") if number else ("\n",)
    text = "".join(json.dumps(one) + rng.choice(ends) for one in lines)
    (folder / "data/data").mkdir(parents=True)
    for path in ("chats.jsonl", "data/data/train-0.jsonl", "data/data/test.jsonl"):
        (folder / path).write_text(text)
    (folder / "data/README.md").write_text("about")
    if number % 2:
        (folder / "data/data/train-1.json").write_text(json.dumps(lines))


# -- arguments -----------------------------------------------------------------------------------------------------

WORDS = (
    *("", "x", "0", "-1", "1", "1e999", "nan", "99999999999999999999", "re:(", "re:.*q_proj", "=", "a=b"),
    *("6:8", "../x", "\udcff", "\x1b[2J", "re:.*q=4:6"),
)

VALUES_OF_OPTIONS = (
    *("6:8", "4:6", "dense", "int8", "bf16", "2", "16", "0", "cpu", "cuda", "TEXT", "SOURCE", "missing"),
    *("lm_head", "re:.*mlp.*", "re:.*", "re:.*down_proj=4:6", "re:.*down_proj=dense"),
    *("CHATS", "DATA", "BASE", "TEXT:3", "CHATS:0.5", "DATA:1e300", "", "1e-3", "30", "9999999G", "100000", "64"),
)
"""Values that some option takes; those in capitals are files and folders of a case. Choices take one of theirs."""

SKIPPED = {
    *("--help", "--verbose", "--dry-run"),  # which say more, or make nothing
    *("--match-steps", "--tasks", "--revision"),  # which take long, or need more
}


def options_of(command: str) -> dict[str, tuple[str, ...]]:
    """The options of a command with values to try; none for a flag."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    actions = commands.choices[command]._actions if command in commands.choices else ()
    named = {action.option_strings[-1]: action for action in actions if action.option_strings}
    return {
        name: () if action.nargs == 0 else tuple(action.choices or VALUES_OF_OPTIONS)
        for name, action in named.items()
        if name not in SKIPPED
    }


WRITING = ("prune", "recover", "chats")
"""Commands with a destination."""


USUAL: dict[str, list[str]] = {
    "inspect": [],
    "load": [],
    "prune": ["--pattern", "6:8", "--method", "magnitude", "--device", "cpu"],
    "eval": ["--text", "TEXT", "--window", "32", "--device", "cpu"],
    "recover": [
        *("--text", "TEXT", "--tokens", "96", "--batch", "32", "--window", "8", "--eval-windows", "2", "--lr", "1e-3"),
        *("--dense", "BASE", "--device", "cpu"),
    ],
    "chats": ["--count", "2", "--prompts", "CHATS", "--max-tokens", "2", "--device", "cpu"],
}


def command_line(case: Case, folder: Path) -> list[str]:
    """Words of a command on ``folder/m``, whose output goes to ``folder/out``."""
    words = list(USUAL[case.command])
    for number in case.arguments:
        rng = random.Random(number)
        known = options_of(case.command)
        if not known:
            break
        option = rng.choice(sorted(known))
        if option in words and rng.random() < 0.5:  # in the place of the usual one
            place = words.index(option)
            del words[place : place + (2 if known[option] else 1)]
        words.append(option)
        if known[option]:
            words.append(rng.choice(known[option]) if rng.random() < 0.75 else rng.choice(WORDS))
    named = {"TEXT": "text.txt", "SOURCE": "m", "CHATS": "chats.jsonl", "DATA": "data", "BASE": "base"}
    parts = (word.partition(":") for word in words)
    words = [
        f"{folder / named[name]}{colon}{end}" if name in named else name + colon + end for name, colon, end in parts
    ]
    out = [str(folder / "out")] if case.command in WRITING else []
    if case.arguments and random.Random(case.arguments[0] + 1).random() < 0.1 and out:
        places = ("m", "m/in", "out/..", "text.txt", "text.txt/x", "n" * 300, "a/b/c")
        out = [str(folder / random.Random(case.arguments[0]).choice(places))]
    return [case.command, str(folder / "m"), *out, *words]


# -- what is there -------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder, to be compared."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        content: object = None
        if stat.S_ISLNK(kind):
            content = os.readlink(path)
        elif stat.S_ISREG(kind):
            content = path.read_bytes()
        found[os.fsencode(path.relative_to(folder)).decode("latin-1")] = (kind, stat.S_IMODE(status.st_mode), content)
    return found
