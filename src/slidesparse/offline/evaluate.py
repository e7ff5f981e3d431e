"""``slidesparse eval``: perplexity of a checkpoint on a text, and its scores in tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.arguments import list_of_names, require_plain
from slidesparse.base.counted import counted
from slidesparse.base.device import usable_device
from slidesparse.base.other_libraries import LOCAL, other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import advice, progress_bar, say
from slidesparse.checkpoints.check_tensors import check_finite, refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.load import load
from slidesparse.checkpoints.marker import Marker, is_bitnet, other_quantisation, quantisation_dtype
from slidesparse.checkpoints.meta_model import build_meta_model, model_class
from slidesparse.errors import (
    CheckpointError,
    InputError,
    SlideSparseError,
    UnsupportedError,
    first_line,
    library_errors,
)
from slidesparse.files.hub import source_folder
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.causal import require_causal
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.packed_mixture import PackedMixture
from slidesparse.models.perplexity import Perplexity, check_windows, logits_of, measure_perplexity, windows
from slidesparse.offline.calibrate.calibration import (
    check_tokens,
    load_tokenizer,
    positions,
    tokens_before,
    tokens_of,
)  # fmt: skip
from slidesparse.offline.calibrate.texts import as_text, read_documents
from slidesparse.weights.pattern import DENSE

FEW_TOKENS = 1000
"""Tokens below which a warning follows the figures. Losses of single tokens scatter by nats: with a deviation of 3 the
mean of 1000 is uncertain by 0.1, and the perplexity by a tenth."""


def warn_of_few(tokens: int, remedy: str = f"take {FEW_TOKENS} or more") -> list[str]:
    """Return a warning line where tokens are too few for reliable figures, else none."""
    line = f"only {counted(tokens, 'token')}: another text may give quite other figures; {remedy}"
    return advice([line]) if tokens < FEW_TOKENS else []


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Evaluation:
    """Quality of a checkpoint.

    Attributes:
        model: Folder of the checkpoint.
        text: Text of the perplexity, or None.
        perplexity: Perplexity on that text, or None.
        tasks: Task -> metric -> value, of lm-evaluation-harness.
        experts: Sentence on the run of pruned experts; None for models without.
    """

    model: str
    text: str | None
    perplexity: Perplexity | None
    tasks: dict[str, dict[str, float]]
    experts: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with loss, perplexity and bits per byte."""
        fields, measured = asdict(self), self.perplexity
        if measured is not None:
            derived = {"loss": measured.loss, "perplexity": _json_number(measured.perplexity)}
            fields["perplexity"] |= {**derived, "bits_per_byte": measured.bits_per_byte}
        fields["tasks"] = {task: {k: _json_number(v) for k, v in one.items()} for task, one in self.tasks.items()}
        return fields

    def describe(self) -> str:
        """Return the evaluation as text."""
        lines = []
        if (p := self.perplexity) is not None:
            one = f"one window of {p.tokens + 1} tokens"
            read = one if p.tokens < p.window else f"windows of {p.window} every {p.stride}"
            lines.append(
                f"perplexity {p.perplexity:.4f}, {p.bits_per_byte:.4f} bits per byte"
                f" ({counted(p.tokens, 'token')} of {self.text}, {read})"
            )
            lines += warn_of_few(p.tokens)
        lines += [f"{task}: {name} {value:.4f}" for task, one in self.tasks.items() for name, value in one.items()]
        return "\n".join(lines if self.experts is None else [*lines, self.experts])


def evaluate(
    checkpoint: str | Path,
    text: str | Path | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    batch: int = 1,
    bos: bool = True,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Evaluation:
    """Evaluate a checkpoint as ``slidesparse eval`` does: perplexity on a text, scores in tasks, or both.

    Args:
        checkpoint: One that ``prune`` wrote, which runs sparse, or any other that transformers loads: a folder, or
            ``NAMESPACE/NAME`` of the hub.
        text: A ``.txt``, ``.jsonl`` or ``.parquet`` file, a folder of these, or a data set; None: no perplexity.
        window: Tokens of a text window; None: 2048, or as many as the model can read.
        stride: Tokens between the starts of windows; None: half a window.
        tasks: Names or files of tasks of lm-evaluation-harness.
        limit: Examples of each task; None: all.
        batch: Windows or examples at a time.
        bos: Begin each window with the tokenizer's special tokens, such as BOS.
        device: ``cpu`` or ``cuda``; None: a GPU when there is one.
        revision: Branch, tag or commit of a model of the hub; None: its main branch.

    Returns:
        The evaluation; ``describe()`` is what the command prints, and ``to_json()`` what it prints with ``--json``.

    Raises:
        InputError: Nothing to do, unusable text or windows, a task that fails, or a model that answers with NaN.
        CheckpointError: The checkpoint or its tokenizer cannot be loaded.
        UnsupportedError: lm-evaluation-harness is not installed, or too old for this transformers.

    Example::

        dense, pruned = (ss.evaluate(model, "text.txt").perplexity for model in ("./Qwen2.5-7B", "./Qwen2.5-7B-6of8"))
        print(f"perplexity rises by {100 * (pruned.perplexity / dense.perplexity - 1):.1f} %")
    """
    require_plain(evaluate, locals())
    tasks = list_of_names(tasks, "tasks")
    if text is None and not tasks:
        raise InputError("nothing to evaluate", needed="a text or tasks", remedy="add --text FILE or --tasks NAME")
    for name, value in (("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"--{name}", got=value, needed="1 or more")
    if text is None:
        given = {"--window": window, "--stride": stride, "--no-bos": None if bos else False}
        _refuse_idle(given, "--text", "a text, which is read in windows")
    if not tasks:
        _refuse_idle({"--limit": limit}, "--tasks", "tasks, which have examples")
    check_windows(window, stride)
    where = usable_device(device)
    if text is not None:
        usable_path(text, "text")
    documents = None if text is None else read_documents(text)  # not as a Path, which would be no data set's name
    harness = _harness() if tasks else None
    source = Checkpoint(source_folder(checkpoint, revision))
    require_causal(*model_class(source))
    tokenizer = load_tokenizer(source.path)
    model = load_any(source, where)
    measured = None
    if documents is not None:
        tokens = tokens_of(documents, tokenizer, show=None)
        check_tokens(tokens, model.config, source.path)
        content = as_text(documents, tokenizer)  # for the bytes of the text
        before = (tokens_before(tokenizer) if bos else tokens[:0]).to(where)
        measured = _perplexity(model, tokens.to(where), before, content, window, stride, batch)
    scores = {} if harness is None else _run_tasks(harness, model, tokenizer, tasks, limit, batch)
    experts = how_experts_ran(source, model)
    return Evaluation(str(source.path), None if text is None else str(text), measured, scores, experts)


def _refuse_idle(options: Mapping[str, int | None], of: str, needed: str) -> None:
    """Refuse options without effect, because the option they modify is missing."""
    given = ", ".join(name for name, value in options.items() if value is not None)
    if given:
        got, remedy = f"{given} without {of}", f"add {of}, or leave out {given}"
        raise InputError("options without effect", got=got, needed=needed, remedy=remedy)


def _perplexity(
    model: Any, tokens: torch.Tensor, before: torch.Tensor, content: str,
    window: int | None, stride: int | None, batch: int,
) -> Perplexity:  # fmt: skip
    if len(before) and torch.equal(tokens[: len(before)], before):
        tokens = tokens[len(before) :]
    window = min(positions(model.config), len(tokens) + len(before)) if window is None else window
    most = positions(model.config, at_most=window)
    if window > most:
        raise InputError("--window", got=window, needed=f"at most {most}, the model's positions")
    stride = max(window // 2, 1) if stride is None else stride
    if tokens.device.type == "cpu":
        say("eval", _cost(model, tokens, before, window, stride))
    with progress_bar("eval", max(len(tokens) - 1, 0), unit="tokens") as advance:
        how: Any = {"n_bytes": len(content.encode()), "batch": batch, "advance": advance, "before": before}
        return measure_perplexity(logits_of(model), tokens, window, stride, **how)


def _cost(model: Any, tokens: torch.Tensor, before: torch.Tensor, window: int, stride: int) -> str:
    """Return the line on the cost of an evaluation on a CPU."""
    number = sum(1 for _ in windows(len(tokens), max(window - len(before), 1), stride, 0 if len(before) else 1))
    line = f"{counted(number, 'window')} of {window} tokens on the CPU, {counted(len(tokens), 'token')} to score"
    sparse = any(isinstance(module, SlideLinear | PackedMixture) for module in model.modules())
    return line + ("; a pruned checkpoint is slower than dense there, as expected" if sparse else "")


def how_experts_ran(checkpoint: Checkpoint, model: Any) -> str | None:
    """Return a sentence on the run of a loaded checkpoint's pruned experts; None where it has none."""
    marker = Marker.from_config(checkpoint.config)
    names = [] if marker is None else [name for name, pattern in marker.experts.items() if pattern != DENSE]
    if not names:
        return None
    if quantisation_dtype(checkpoint.config) is None:
        return "pruned experts ran dense"
    pruned = len({name.replace(".*", "").rpartition(".")[0] for name in names})
    dense = pruned - sum(isinstance(module, PackedMixture) for module in model.modules())
    if not dense:
        return "pruned experts ran sparse"
    layers = f"{dense} of {counted(pruned, 'layer')}"
    return f"pruned experts ran dense in {layers}, with inputs that vLLM rounds and that were not"


def load_any(checkpoint: Checkpoint, device: torch.device) -> Any:
    """Load a model for inference: with sparse layers if ``prune`` wrote it, else as transformers does.

    Raises:
        CheckpointError: It cannot be loaded, or lacks weights, which transformers would make up.
    """
    if checkpoint.config.get(MARKER_KEY) is not None:
        return load(checkpoint.path, device)
    return load_by_transformers(checkpoint, device)


def load_by_transformers(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | str = "auto") -> Any:
    """Load a model as transformers does, with the errors of :func:`load_any`."""
    path, (known, config) = checkpoint.path, model_class(checkpoint)
    # transformers renames the tensors of other formats.
    if not is_bitnet(checkpoint.config) and other_quantisation(checkpoint.config) is None:
        refuse_faults(build_meta_model(checkpoint), checkpoint)
    with library_errors(CheckpointError, f"transformers cannot load {path}"), other_library():
        model, loading = known.from_pretrained(str(path), config=config, dtype=dtype, output_loading_info=True, **LOCAL)
        model = model.to(device).eval()
        if checkpoint.config.get("quantization_config"):  # compressed-tensors unpacks in the first call
            model(torch.zeros(1, 1, dtype=torch.int64, device=device))
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"the checkpoint lacks {counted(len(missing), 'tensor')} of {known.__name__}",
            got=f"no {', '.join(missing[:3])}",
        )
    for name, parameter in model.named_parameters():
        check_finite(parameter.detach(), name)
    return model


def _harness() -> Any:
    remedy = 'pip install ".[eval]" in a checkout of slidesparse'
    try:
        import lm_eval
        import lm_eval.models.huggingface
    except Exception as error:  # missing, or 0.4.9, which looks for a class that transformers no longer has
        what = "lm-evaluation-harness cannot be imported"
        raise UnsupportedError(what, got=first_line(error), remedy=remedy) from error
    return lm_eval


def _run_tasks(
    harness: Any, model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None, batch: int
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, without names, counts and values that are no number ("N/A")."""
    # Its bars are the only sign of progress for hours, on a terminal.
    bars = nullcontext() if sys.stderr is not None and sys.stderr.isatty() else other_library()
    with bars:
        wrapped = harness.models.huggingface.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, trust_remote_code=False
        )
        try:
            results = harness.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, log_samples=False)
        except (SlideSparseError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a task has templates and Python of its own, which can raise anything
            raise InputError(
                f"cannot run {', '.join(tasks)}",
                got=first_line(error),
                needed="tasks that lm-evaluation-harness knows, or their files, with data that is here",
            ) from error
    return {
        task: {name: float(value) for name, value in values.items() if "," in name and isinstance(value, int | float)}
        for task, values in results["results"].items()
    }
