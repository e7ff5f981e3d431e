"""``slidesparse recover``: training of a pruned checkpoint toward its dense model, with the zeros held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slidesparse.base.counted import counted
from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import say
from slidesparse.base.ranks import ALONE, Ranks, explained
from slidesparse.base.version import __version__
from slidesparse.checkpoints.checkpoint import INDEX_FILE
from slidesparse.checkpoints.expert_tensors import ExpertReader
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.errors import InputError, UnsupportedError, first_line
from slidesparse.files.mixed_texts import without_folder
from slidesparse.files.source_files import survey
from slidesparse.files.staging import Workplace, new_folder, staged_together
from slidesparse.models.causal import vocabulary_of
from slidesparse.models.parts import text_config
from slidesparse.offline.calibrate.calibration import positions
from slidesparse.recovery.memory import Fit, fit_memory
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork, compile_, compiles, divide, fill
from slidesparse.recovery.options import RecoverOptions, default_lr
from slidesparse.recovery.ordered_sums import choose_kernels, ordered_sums
from slidesparse.recovery.outcome import Recovery
from slidesparse.recovery.pair import Pair
from slidesparse.recovery.result import RECORD, gathered, round_as_stored, write_result
from slidesparse.recovery.state import Progress, State, describe_saved
from slidesparse.recovery.trained import has_held_zeros
from slidesparse.recovery.training import MOST_LEFT_OUT, Training
from slidesparse.recovery.windows import Windows, read_windows

WINDOWS = "windows.safetensors"


def recover(
    pruned: str | Path,
    dense: str | Path,
    destination: str | Path,
    options: RecoverOptions,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
) -> Recovery:
    """Train a pruned checkpoint toward the dense model it came from, into a new folder.

    Processes that torchrun started call this together, with equal arguments but for the device. Arguments and errors
    are those of :func:`slidesparse.recover`.
    """
    where = usable_device(device)
    pair = Pair(usable_path(pruned, "pruned checkpoint"), usable_path(dense, "dense checkpoint"), options)
    destination = usable_path(destination, "destination")
    for source in (pair.dense.path, pair.pruned.path):
        destination = new_folder(destination, source)
    if ranks.is_first:
        pair.warn_of_another_teacher()
    _check_windows(pair, options, ranks)
    compiled = pair.compilable and compiles(where)
    files = survey(pair.pruned.path, {"config.json", INDEX_FILE, RECORD, *pair.pruned.shards}, links=None)
    lr = options.lr or default_lr(text_config(pair.student.model.config).hidden_size)
    with ordered_sums(where), _connected(ranks, where):
        with _explained():
            training_on = _set_up(pair, options, ranks, where, compiled)
        windows = None
        if ranks.is_first:  # it cuts them for all, once
            pair.require_one_tokenizer()
            windows = read_windows(pair.pruned.path, pair.student.model.config, options)
        digest = ranks.gather(windows and windows.digest())[0]
        # Options that do not change the result may differ when a run is resumed; texts count by what is in them.
        free = {"micro_batch": 32, "save_minutes": 5.0, "gradient_checkpointing": "auto", "lr": lr}
        decisive = {**asdict(options), **free, "texts": digest}
        weights = [fingerprint(one, one.config) for one in (pair.pruned, pair.dense)]
        record = {"slidesparse": __version__, "options": decisive, "weights": weights, "device": where.type}
        size = pair.pruned.n_bytes + files.n_bytes + 2 * 12 * pair.size.trained  # two states, while one is replaced
        with staged_together(ranks, destination, pair.pruned.path, record, size) as work:
            work.describe = lambda: describe_saved(work.kept, None if options.minutes else options.steps)
            if windows and ranks.world > 1:
                windows.save(work.kept / WINDOWS)
            ranks.wait()
            with _explained():
                windows = windows or Windows.load(work.kept / WINDOWS, options)
                training = training_on(windows, lr)
                figures = _train(training, work, pair)
                trained = figures["kept"] == "after"
                tensors = gathered(training.parameters, pair.student, pair.pruned, ranks.is_first) if trained else {}
            if ranks.is_first:
                if files.not_copied:
                    say("recover", f"not copied, other weights or code: {', '.join(files.not_copied)}")
                # File names without folders: the result may be published, and paths are this machine's.
                named = {**decisive, "texts": [*map(without_folder, options.texts)]}
                told = {**record, "options": named, "compiled": compiled, **figures}
                write_result(work, pair.pruned, files, tensors, told)
    return Recovery(destination=str(destination), **{**figures, "losses": tuple(figures["losses"])})


def _check_windows(pair: Pair, options: RecoverOptions, ranks: Ranks) -> None:
    """Raise an InputError for windows that the processes, the budget or the model's positions cannot take."""
    if options.windows % ranks.world:
        remedy = f"use --batch {-(-options.windows // ranks.world) * ranks.world * options.window}"
        raise InputError("windows of a step", got=options.windows, needed=f"a multiple of {ranks.world}", remedy=remedy)
    if options.tokens is not None and options.tokens < options.step_tokens:
        needed = f"{options.step_tokens} or more, those of a step"
        raise InputError("--tokens", got=options.tokens, needed=needed, remedy="use a smaller --batch")
    if options.window > (most := positions(pair.student.model.config, options.window)):
        raise InputError("--window", got=f"{options.window} tokens", needed=f"at most {most}, the model's positions")


def _set_up(
    pair: Pair, options: RecoverOptions, ranks: Ranks, device: torch.device, compiled: bool
) -> Callable[[Windows, float], Training]:
    """Divide both networks among the processes, fill and check them, and return the training, but for text and rate."""
    fit = Fit.of_all(ranks.gather(astuple(fit_memory(pair.size, options, ranks.world, device))))
    mesh = init_device_mesh(device.type, (ranks.world,))
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpointing = "on" if fit.gradient_checkpointing else "off"
    LOG.info("micro-batch: %d windows; gradient checkpointing: %s", fit.micro_batch, checkpointing)
    # Without dropout: the dense model predicts without it, too.
    dense, student = DenseNetwork(pair.teacher.model).eval(), StudentNetwork(pair.student.model).eval()
    if compiled:
        compile_(student)  # before gradient checkpointing wraps its layers
    if ranks.world > 1:
        divide(dense, mesh, compute)
    divide(student, mesh, compute, fit.gradient_checkpointing)
    fill(dense, pair.teacher, pair.dense.tensor, compute, device)
    dense.requires_grad_(False)
    few = (torch.arange(16, device=device) % (vocabulary_of(pair.teacher.model.config) or 16))[None]
    if device.type == "cuda":
        choose_kernels(dense, few, alone=ranks.world == 1)
    held: set[str] = set()

    def look(name: str, value: torch.Tensor) -> None:
        if name in pair.prunable and has_held_zeros(name, value, pair.marker):
            held.add(name)

    reader = ExpertReader(pair.pruned, pair.student, "cpu")  # which checks the patterns of experts
    filled = fill(student, pair.student, reader.tensor, torch.float32, device, look)
    dense.require_plain_head(few)
    if compiled:
        compile_(dense)  # only now: the passes before had other shapes
    parameters = {name: one for name, one in filled.items() if one.requires_grad}
    held &= parameters.keys()

    def training_on(windows: Windows, lr: float) -> Training:
        return Training(student, dense, windows, parameters, held, options, lr, fit, ranks, device)

    return training_on


def _train(training: Training, work: Workplace, pair: Pair) -> dict[str, Any]:
    """Train from the last saved state, and return the figures of a :class:`Recovery`."""
    options, ranks = training.options, training.ranks
    state = State(work.kept, training.parameters, training.optimizer)
    progress = state.load(ranks)
    say("recover", _plan(training, progress))
    if not progress.before:
        progress.before = _finite(training.evaluate(), "the pruned model predicts NaN or Inf", "prune it anew")
    training.run(state, progress)
    state.save(progress, ranks)  # so that a kill from here on loses nothing
    round_as_stored(training.parameters, pair.student, pair.pruned)
    before, after = progress.before, _finite(training.evaluate(), "training ended in NaN or Inf", "use a lower --lr")
    return {
        "kept": "after" if after["kl"] < before["kl"] else "before",
        "steps": progress.step,
        "tokens": progress.step * options.step_tokens,
        "seconds": round(progress.seconds, 3),
        "lr": training.lr,
        "left_out": progress.left_out,
        "ended_early": progress.in_a_row >= MOST_LEFT_OUT,
        "eval_tokens": training.windows.evaluation.numel(),
        "before": before,
        "after": after,
        "losses": progress.losses,
    }


def _finite(figures: dict[str, float], what: str, remedy: str) -> dict[str, float]:
    """Return figures, or raise an InputError where one is no number: such a run has no result."""
    if not all(map(math.isfinite, figures.values())):
        raise InputError(what, got=", ".join(f"{name} {value}" for name, value in figures.items()), remedy=remedy)
    return figures


def _plan(training: Training, progress: Progress) -> str:
    """Return the line on the windows, steps and epochs of a run."""
    options, windows = training.options, training.windows
    line = f"{windows.count} windows of {options.window} tokens to train on, {len(windows.evaluation)} to evaluate on"
    if options.steps is not None:
        epochs, tokens = options.steps * options.windows / windows.count, options.steps * options.step_tokens
        most = "at most " if options.minutes else ""
        line += f"; {most}{counted(options.steps, 'step')} of {options.windows} windows, "
        line += "" if tokens == options.tokens else f"{tokens} tokens, "
        line += f"{epochs:.3g} times through the text" if epochs >= 1 else f"{100 * epochs:.3g} % of the text"
    return line + (f"; resumes after step {progress.step}" if progress.step else "")


@contextmanager
def _connected(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Form a group of a single process, so that there is one way to train; several processes have theirs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world > 1:
        yield
        return
    kind, store = "nccl" if device.type == "cuda" else "gloo", cast("Any", dist).HashStore()  # which has no types
    dist.init_process_group(kind, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _explained() -> Iterator[None]:
    """Explain errors of memory, of compilation, and of transfers to a process that has ended."""
    try:
        with explained():
            yield
    except torch.cuda.OutOfMemoryError as error:
        remedy = "use --micro-batch 1, --gradient-checkpointing on, or more GPUs; the run resumes with them"
        raise UnsupportedError("the memory of a GPU is too small", got=first_line(error), remedy=remedy) from error
    except RuntimeError as error:
        if (inner := getattr(error, "inner_exception", None)) is None:  # which errors of torch.compile have
            raise
        got, remedy = first_line(inner), "set TORCH_COMPILE_DISABLE=1; training takes longer then"
        raise UnsupportedError("PyTorch cannot compile the model", got=got, remedy=remedy) from error
