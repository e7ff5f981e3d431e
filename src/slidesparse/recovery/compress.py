"""``slidesparse.compress``: chats, pruning, training, rounding and judging, one after the other.

Of the minutes a quarter is for chats, a half for pruning and rounding, a tenth for judging, and the rest for training,
as far as the chats suffice. What does not fit is made smaller or left out, and the outcome says so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.arguments import require_plain
from slidesparse.base.device import give_blocks_back, usable_device
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import advice, say, table
from slidesparse.base.version import __version__
from slidesparse.base.whole_file import replace_file
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.checkpoints.meta_model import build_meta_model, model_class
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.hub import hub_model, source_folder
from slidesparse.files.json_files import read_json, write_json
from slidesparse.files.staging import staged
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.experts import find_experts
from slidesparse.offline.calibrate.calibration import Calibration, load_tokenizer, positions, tokens_of
from slidesparse.offline.calibrate.chats import Chat, require_chat_template
from slidesparse.offline.calibrate.texts import DEFAULT, read_documents
from slidesparse.offline.estimate import describe_seconds, estimate_seconds, operations_a_second
from slidesparse.offline.outcome import SIX_BITS
from slidesparse.offline.prune import prepare
from slidesparse.offline.prune_function import prune
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.recovery.judge import Figure, judge
from slidesparse.recovery.options import MOST, RecoverOptions
from slidesparse.recovery.own_chats import ChatOptions, chat_line, prompts_of, write_chats_apart
from slidesparse.recovery.recover_function import recover
from slidesparse.recovery.result import RECORD, TYPES
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import FLOATS, QuantName, Rounding, dtype_name

OF_CHATS, OF_PRUNING, OF_JUDGING = 0.25, 0.5, 0.1  # shares of the minutes
UNCOUNTED = {"cuda": 60, "cpu": 0}  # seconds of rounding beside its estimate: 46 and 67 of a 0.5B on an H200

CHATS = {"cuda": (40_000, 400), "cpu": (1_000, 200)}
"""Most chats to write, and most tokens of an answer: a CPU writes about a thousand chats an hour with a small model."""

HELD_OUT = 128
"""Most prompts to judge on: a quarter of all, and eight at least."""

LADDER = ((256, 200), (128, 200), (128, 0), (32, 0), (4, 0))
"""Calibration windows and steps of matching, from the best to the least, the last resort."""

LEAST_WINDOWS, LEAST_TOKENS = 16, 1_000_000
"""Fewest windows of chats to calibrate on (shorter ones of few chats), and fewest tokens to train."""

MOST_READINGS = 32
"""Most readings of the chats in training: 31 of 1,421 and code helped, 118 of 679 did not (docs/log/whose-text.md)."""


@dataclass(frozen=True)
class Compression:
    """Outcome of a run: the table, and what each part did or left out; the model is ``served`` in ``destination``."""

    destination: str
    title: str
    figures: list[Figure]
    lines: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def describe(self) -> str:
        """Return the outcome as text."""
        drawn = table((self.title, "dense", "compressed"), [one.cells() for one in self.figures])
        return "\n".join([drawn, *self.lines, *advice([f"serve it: vllm serve {self.destination}/served"])])

    def page(self) -> str:
        """Return the same as Markdown, without folders of this machine."""
        rows = [f"| {' | '.join(one.cells())} |" for one in self.figures]
        head = [f"# {self.title}", "", "| | dense | compressed |", "|---|---:|---:|"]
        return "\n".join([*head, *rows, "", *(f"- {line}" for line in self.lines), ""])


def compress(
    model: str | Path,
    destination: str | Path,
    pattern: str,
    *,
    minutes: float = 60.0,
    prompts: str | None = None,
    chats: str | None = None,
    dtype: QuantName = "int8",
    rounding: Rounding = "absmax",
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Compression:
    """Let a dense chat model write chats, prune it on them, train, round and judge it: ``slidesparse compress``.

    An interrupted call goes on with the same call; other minutes count for the parts that have not begun. Errors are
    those of :func:`slidesparse.prune` and :func:`slidesparse.recover`.

    Args:
        model: A folder, or ``NAMESPACE/NAME`` of the hub.
        destination: The folder to make; the compressed model is ``served`` in it, and the table ``report.md``.
        pattern: ``6:8``, ``4:6``, ``2:4``, ...
        minutes: Budget of all parts, which are estimated.
        prompts: Prompts for the chats, as in ``slidesparse chats``; None: general ones.
        chats: Chats to read instead.
        dtype: ``int8`` or ``fp8``.
        rounding: Rounding of INT8 weights: ``absmax`` or ``6bit``.
        device: ``cpu`` or ``cuda``; None: a GPU when there is one.
        revision: Branch, tag or commit of a model of the hub; None: its main branch.

    Example::

        import slidesparse as ss

        print(ss.compress("./Qwen2.5-7B", "./compressed", "4:6", minutes=60, rounding="6bit").describe())
    """
    require_plain(compress, locals())
    if not 0 < minutes <= MOST:
        raise InputError("--minutes", got=minutes, needed=f"a number above 0, at most {MOST:g}")
    if Pattern.parse(pattern) == DENSE:
        remedy = "round it alone: slidesparse prune --pattern dense --rounding 6bit"
        raise InputError("--pattern", got=pattern, needed="one with zeros to train", remedy=remedy)
    if prompts is not None and chats is not None:
        raise InputError("--prompts with --chats", needed="one of them", remedy="--chats are answered already")
    given = chats or prompts
    documents = read_documents(given) if given else []
    said = [[one, getattr(one, "tools", None), getattr(one, "tokens", None)] for one in documents]
    texts = hashlib.sha256(json.dumps([chats is None, said]).encode()).hexdigest()
    where, dense = usable_device(device), Checkpoint(source_folder(model, revision))
    options = {"pattern": pattern, "dtype": dtype, "rounding": rounding, "texts": texts}  # not the minutes
    known = {"options": options, "model": fingerprint(dense, dense.config), "device": where.type}
    run = _Run(dense, where, minutes, pattern, dtype, rounding)
    to = usable_path(destination, "destination")
    with staged(to, dense.path, {"slidesparse": __version__, **known}, 0) as work:
        run.open(work.output, work.kept / "parts.json")
        work.describe = lambda: f"what the parts have made ({', '.join(run.parts)})"
        run.do("chats", lambda part: run.write_chats(prompts, chats, part["seconds"]))
        run.do("prune", run.prune)
        if run.parts["prune"]["train"]:
            run.do("recover", run.recover)
            run.do("round", run.round)
        run.do("judge", run.judge)
        done = run.outcome(str(destination))
        replace_file(work.output / "report.md", done.page())
    return done


@dataclass
class _Run:
    """A run: its options, and for each part what was decided, what came of it, and the seconds that it took."""

    dense: Checkpoint
    device: torch.device
    minutes: float
    pattern: str
    dtype: QuantName
    rounding: Rounding

    def open(self, out: Path, state: Path) -> None:
        """Read the state of an interrupted run, or check that the least pruning fits into the minutes."""
        self.out, self.state, self.parts = out, state, dict[str, dict[str, Any]]()
        self.training, self.held_out = out / "training.jsonl", out / "held-out.jsonl"
        self.config = model_class(self.dense)[1]
        self.window = positions(self.config, RecoverOptions.window)
        largest = max(map(self.dense.stored, self.dense.files), key=lambda one: one.n_bytes)
        self.own: Any = TYPES.get(largest.dtype)
        if self.own not in FLOATS or MARKER_KEY in self.dense.config:
            raise CheckpointError(f"{self.dense.path} is quantised or pruned", needed="a dense model in a float type")
        require_chat_template(load_tokenizer(self.dense.path))
        experts = find_experts(build_meta_model(self.dense).model)  # layers of experts cannot be matched
        self.ladder = [(samples, 0 if experts else steps) for samples, steps in LADDER]
        if state.exists():
            self.parts = read_json(state)
            return
        least = self.fit(Calibration(DEFAULT, LADDER[-2][0]))
        if (needed := least["estimated"] / 60 / OF_PRUNING) > self.minutes:
            needs = f"about {math.ceil(needed)} on {self.device.type}, to prune and round at all"
            raise InputError("--minutes", got=f"{self.minutes:g}", needed=needs, remedy="give more, or use a GPU")
        write_json(state, self.parts)  # from here on there is something to keep

    def do(self, name: str, work: Callable[[dict[str, Any]], str]) -> None:
        """Do a part unless it is done; ``work`` gets what is known of it, and returns in words what it did."""
        part = self.parts.setdefault(name, {"seconds": 0.0})
        if "told" in part:
            return
        if "begun" in part:  # and was killed: its last file tells how long it ran
            files = (one.lstat().st_mtime for one in self.out.rglob("*"))
            part["seconds"] += max(0, max(files, default=0) - part["begun"])
        part["begun"], begun = time.time(), time.monotonic()
        write_json(self.state, self.parts)
        say("compress", f"{name}; {max(self.left(0), 0) / 60:.1f} of {self.minutes:g} minutes are left")
        try:
            part["told"] = work(part)
        finally:
            part["seconds"] += time.monotonic() - begun
            del part["begun"]
            write_json(self.state, self.parts)
            gc.collect()  # models in circles of references
            give_blocks_back(self.device)

    def left(self, share: float = OF_JUDGING) -> float:
        """Return the seconds that are left before a last share of them."""
        spent: float = sum(part["seconds"] for part in self.parts.values())
        return 60 * self.minutes * (1 - share) - spent

    def fit(self, text: Calibration, tokens: float = math.inf) -> dict[str, Any]:
        """Return how to prune on ``tokens`` of text: by the best of :data:`LADDER` that fits, with training if so."""
        how: Any = {"calibration": text, "rounding": self.rounding, "match_steps": min(1, self.ladder[0][1])}
        options = PruneOptions(self.pattern, self.dtype, **how)
        plan = prepare(self.dense.path, self.out / "served", options, self.device, "refuse").plan
        layers: Any = plan.layers
        fast = (torch.bfloat16, 4096) if self.device.type == "cuda" else ()
        # A token takes 8 operations a parameter, 2 of them in the dense model, at half the rate of a large product.
        rate = operations_a_second(self.device, *fast) * self.own.itemsize / 16 / self.dense.n_bytes

        def seconds(samples: int, steps: int, rounds: bool = True) -> float:
            matching = replace(layers.matching, steps=steps) if steps else None
            rounder = layers.rounder if rounds else None
            less = replace(layers, windows=layers.windows[:samples], matching=matching, rounder=rounder)
            return estimate_seconds(replace(plan, layers=less), self.device) or 0.0

        half, readable, uncounted = 60 * self.minutes * OF_PRUNING, MOST_READINGS * tokens, UNCOUNTED[self.device.type]
        (*better, last), best = self.ladder, self.ladder[0][1]
        over, rungs = [], [*product((True, False), better), (True, last), (False, last)]
        for train, (samples, steps) in rungs:
            pruning, rounding = seconds(samples, steps, not train), (seconds(samples, 0) + uncounted) * train
            trained = min(readable, rate * (self.left() - pruning - rounding))
            if pruning + rounding <= half and (not train or trained >= LEAST_TOKENS):
                break
        else:
            over = [f"more than a half of the minutes: pruning takes {describe_seconds(pruning)}"]
        cheapest = seconds(better[-1][0], 0, False) + seconds(better[-1][0], 0) + uncounted
        most, least = max(0, rate * (self.left() - cheapest)), f"{LEAST_TOKENS / MOST_READINGS:.0f} and {LEAST_TOKENS}"
        few = f"{tokens} tokens of chats and time for {most:.0f}, where it needs {least}"
        if cheapest > half:
            few = f"pruning and rounding would take {describe_seconds(cheapest)}, more than a half of the minutes"
        takes = f"with which pruning takes {describe_seconds(seconds(samples, best))}" if best else "which have experts"
        left_out = over + [f"no training: {few}"] * (not train) + [f"no matching of layers, {takes}"] * (not steps)
        how = {"samples": min(samples, len(layers.windows)), "length": layers.windows.shape[1], "match_steps": steps}
        return {"how": how, "train": train, "rounding": rounding, "estimated": pruning + rounding, "left_out": left_out}

    def write_chats(self, prompts: str | None, chats: str | None, spent: float) -> str:
        """Write chats in the seconds that are left of their share, or read given ones, and divide them by prompt."""
        file = self.out / "chats.jsonl"
        if chats is None and not file.exists():
            count, longest = CHATS[self.device.type]
            options = ChatOptions(count, prompts, min(longest, positions(self.config) // 2))
            if prompts is not None:  # or tell too few
                divide_by_prompt([Chat([*one, {"role": "assistant"}]) for one in prompts_of(options)])
            minutes = max(self.minutes * OF_CHATS - spent / 60, 0.01)  # a few are written anyway
            write_chats_apart(self.dense.path, file, options, str(self.device), minutes)
        read = read_documents(chats or file)
        found = [one for one in read if isinstance(one, Chat) and any(said["role"] == "assistant" for said in one)]
        training, held_out = divide_by_prompt(found)
        replace_file(self.held_out, b"".join(map(chat_line, held_out)))
        replace_file(self.training, b"".join(map(chat_line, training)))
        left_out = f", {len(read) - len(found)} others without answers left out" if len(read) > len(found) else ""
        return f"{len(found)} {'read' if chats else 'written by the dense model'}{left_out}"

    def prune(self, part: dict[str, Any]) -> str:
        """Prune, in the type of the source if training follows."""
        if "how" not in part:
            part["tokens"] = tokens = len(tokens_of(read_documents(self.training), load_tokenizer(self.dense.path)))
            length = min(positions(self.config), tokens, max(tokens // LEAST_WINDOWS, 512))
            part |= self.fit(Calibration(str(self.training), min(LADDER[0][0], tokens // length), length), tokens)
            write_json(self.state, self.parts)
        for line in part["left_out"]:
            say("compress", line)
        how = part["how"]
        self.make("pruned" if part["train"] else "served", self.dense.path, how, rounded=not part["train"])
        matched = f", {how['match_steps']} steps of matching a layer" if how["match_steps"] else ""
        done = f"sparsegpt, {how['samples']} windows of {how['length']} tokens of chats{matched}"
        return "; ".join([done, *part["left_out"]])

    def make(self, name: str, source: Path, how: dict[str, Any], rounded: bool = True) -> None:
        """Prune or round a checkpoint into the folder of this name, unless it is there."""
        if not (self.out / name).exists():
            form = {"dtype": self.dtype, "rounding": self.rounding} if rounded else {"dtype": dtype_name(self.own)}
            prune(source, self.out / name, self.pattern, calibration=self.training, device=self.device, **form, **how)

    def recover(self, part: dict[str, Any]) -> str:
        """Train the pruned model in the minutes that are left, or as far as the chats suffice."""
        plan, to = self.parts["prune"], self.out / "recovered"
        minutes = part.setdefault("minutes", (self.left() - plan["rounding"]) / 60)
        if minutes <= 0:
            return "left out: the time for it is spent"
        write_json(self.state, self.parts)  # a run goes on with the same minutes alone
        if not to.exists():
            how: dict[str, Any] = {"minutes": minutes, "window": self.window, "device": self.device}
            how["tokens"] = MOST_READINGS * plan["tokens"]
            recover(self.out / "pruned", self.dense.path, to, texts=[self.training], **how)
        known = read_json(to / RECORD)
        kl = "{:.4f} -> {:.4f}".format(*(known[when]["kl"] for when in ("before", "after")))
        helped = "" if known["kept"] == "after" else ", which did not help: untrained weights are kept"
        return f"{known['tokens']} tokens, {known['tokens'] / plan['tokens']:.1f} times the chats, KL {kl} nats{helped}"

    def round(self, part: dict[str, Any]) -> str:
        """Round what was trained."""
        source = next(one for one in (self.out / "recovered", self.out / "pruned") if one.exists())
        self.make("served", source, {**self.parts["prune"]["how"], "match_steps": 0})
        return "sparsegpt, on the same text"

    def judge(self, part: dict[str, Any]) -> str:
        """Compare the result with the dense model, and time its linears on a GPU."""
        served, chats = self.out / "served", [one for one in read_documents(self.held_out) if isinstance(one, Chat)]
        words, figures = judge(self.dense.path, served, chats, self.device, self.window, 60 * self.minutes * OF_JUDGING)
        figures.append(Figure("files of weights, MB", *(one.n_bytes / 1e6 for one in (self.dense, Checkpoint(served)))))
        part["figures"] = [asdict(one) for one in figures]
        return f"{words}, to prompts that nothing was calibrated or trained on; ± is a standard error"

    def outcome(self, destination: str) -> Compression:
        """Return the outcome of all parts."""
        origin, six_bits = hub_model(self.dense.path), self.rounding == "6bit"
        model = self.dense.path.resolve().name if origin is None else origin.repository
        lines = [f"{name}: {part['told']} ({part['seconds'] / 60:.1f} minutes)" for name, part in self.parts.items()]
        title = f"{model}, {self.pattern}, {self.dtype}{' of six bits' if six_bits else ''}"
        figures = [Figure(**one) for one in self.parts["judge"]["figures"]]
        return Compression(destination, title, figures, [*lines, *([SIX_BITS] if six_bits else [])])


def divide_by_prompt(chats: list[Chat]) -> tuple[list[Chat], list[Chat]]:
    """Return the chats to train on, and one of each prompt that is held out, which no other then has.

    A chat's prompt is all before its first answer.
    """
    by_prompt: dict[str, list[Chat]] = {}
    for chat in chats:
        prompt = json.dumps([*takewhile(lambda one: one["role"] != "assistant", chat)])
        by_prompt.setdefault(hashlib.sha256(prompt.encode()).hexdigest(), []).append(chat)
    answered = sorted(key for key, some in by_prompt.items() if some[0][-1]["role"] == "assistant")
    if len(answered) < 16:
        remedy = "give more prompts; chats without answers are --prompts"
        raise InputError("different prompts with answers", got=len(answered), needed="16 or more", remedy=remedy)
    held_out = set(answered[: min(HELD_OUT, max(8, len(answered) // 4))])
    training = [chat for key, some in by_prompt.items() if key not in held_out for chat in some]
    return training, [by_prompt[key][0] for key in sorted(held_out)]
