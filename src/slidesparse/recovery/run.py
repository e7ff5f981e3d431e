"""``slidesparse recover``: from a pruned checkpoint to one that predicts more like the dense model, zeros held."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slidesparse.base.counted import counted
from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import advice
from slidesparse.base.ranks import ALONE, Ranks, explained
from slidesparse.base.version import __version__
from slidesparse.checkpoints.check_tensors import refuse_faults
from slidesparse.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertReader
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.checkpoints.marker import Marker, source_quantisation
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import CheckpointError, InputError, SlideSparseWarning, UnsupportedError, first_line
from slidesparse.files.json_files import read_json, write_json
from slidesparse.files.mixed_texts import without_folder
from slidesparse.files.shared_staging import staged_together
from slidesparse.files.source_files import survey
from slidesparse.files.staging import Workplace, new_folder
from slidesparse.models.causal import refuse_masked, vocabulary_of
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.experts import find_experts
from slidesparse.models.parts import text_config
from slidesparse.offline.calibrate.calibration import load_tokenizer, positions
from slidesparse.offline.evaluate import warn_of_few
from slidesparse.offline.option_names import as_written
from slidesparse.recovery.memory import Fit, Size, fit_memory
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork, compile_, compiles, divide, fill
from slidesparse.recovery.options import RecoverOptions, usual_rate
from slidesparse.recovery.ordered_sums import choose_kernels, ordered_sums
from slidesparse.recovery.result import RECORD, gathered, write_result
from slidesparse.recovery.rounding import round_linears_
from slidesparse.recovery.state import State, describe_saved
from slidesparse.recovery.trained import choose_trained, has_held_zeros, require_pattern
from slidesparse.recovery.training import MOST_LEFT_OUT, Training, say
from slidesparse.recovery.windows import Windows, read_windows
from slidesparse.weights.quant import parse_dtype, rounding_of

WINDOWS, BEFORE = "windows.safetensors", "before.json"
OF_BEFORE = "let --dense name the model of before pruning"


@dataclass(frozen=True)
class Recovery:
    """The outcome of a run.

    Attributes:
        destination: The new checkpoint.
        kept: Whose weights it has: ``after`` the training, or ``before`` where that did not help.
        steps: Steps that were made; ``left_out`` of them had no finite loss.
        tokens: Tokens that were trained on, in ``seconds``.
        rate: The highest rate.
        ended_early: Whether there was no finite loss any more.
        held_tokens: Tokens of the held windows.
        before: What :meth:`slidesparse.recovery.training.Training.judge` says of the pruned model.
        after: The same of the trained one.
        losses: Mean loss of each step.
    """

    destination: str
    kept: str
    steps: int
    tokens: int
    seconds: float
    rate: float
    left_out: int
    ended_early: bool
    held_tokens: int
    before: dict[str, float]
    after: dict[str, float]
    losses: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the losses, of which there may be many."""
        return {name: value for name, value in asdict(self).items() if name != "losses"}

    def describe(self) -> str:
        """Return the outcome as text."""
        b, a, speed = self.before, self.after, self.tokens / max(self.seconds, 1e-9)
        lines = [
            f"trained on {self.tokens} tokens in {self.seconds:.0f} s, {speed:.0f} a second, rate {self.rate:.2g}",
            f"held-out KL from the dense model: {b['kl']:.4f} -> {a['kl']:.4f} nats ({self.held_tokens} tokens)",
            f"held-out loss: dense {b['dense_loss']:.4f}, pruned {b['loss']:.4f}, trained {a['loss']:.4f}",
            f"agrees with the dense model's next token: {b['same']:.1%} -> {a['same']:.1%}",
            *warn_of_few(self.held_tokens, "use more text, or a larger --held"),
        ]
        if self.left_out:
            lines.append(f"{self.left_out} steps were left out, since their loss was NaN or Inf")
        if self.ended_early:
            early = f"it ended early, after {MOST_LEFT_OUT} such steps in a row"
            lines.append(": ".join([early, *advice(["use a lower --rate"])]))
        kept = "the trained weights" if self.kept == "after" else "the weights of before, which are the better ones"
        then = advice(["quantise it with slidesparse prune, calibrated"])
        return "\n".join([*lines, "; ".join([f"{self.destination} has {kept}", *then])])


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

    Processes that torchrun started call this together, with equal arguments but for the device.

    The pruned one is in a float type, with a pattern of zeros; ``destination`` is a folder that does not exist, and
    ``device`` that of this process.

    Raises:
        CheckpointError: A checkpoint cannot be used, or the two do not belong together; the disk is full.
        InputError: A text, an option or a path cannot be used.
        UnsupportedError: There is no such device, or its memory is too small.
    """
    where = usable_device(device)
    pair = _Pair(usable_path(pruned, "pruned checkpoint"), usable_path(dense, "dense checkpoint"), options)
    destination = new_folder(usable_path(destination, "destination"), pair.pruned.path)
    if ranks.is_first:
        pair.warn_of_another_teacher()
    if options.windows % ranks.world:
        remedy = f"use --batch {-(-options.windows // ranks.world) * ranks.world * options.window}"
        raise InputError("windows of a step", got=options.windows, needed=f"a multiple of {ranks.world}", remedy=remedy)
    if options.window > (most := positions(pair.student.model.config, options.window)):
        raise InputError("--window", got=f"{options.window} tokens", needed=f"at most {most}, the model's positions")
    compiled = pair.plain and compiles(where)
    files = survey(pair.pruned.path, {"config.json", INDEX_FILE, RECORD, *pair.pruned.shards})
    rate = options.rate or usual_rate(text_config(pair.student.model.config).hidden_size)
    # What does not change the result may be another one when a run goes on.
    told = replace(options, micro=32, save_minutes=5.0, recompute="auto", rate=rate)
    weights = [fingerprint(one, one.config) for one in (pair.pruned, pair.dense)]
    record = {"slidesparse": __version__, "options": asdict(told), "weights": weights, "device": where.type}
    size = pair.pruned.n_bytes + files.n_bytes + 2 * 12 * pair.size.trained  # two states, while one replaces the other
    with ordered_sums(where), staged_together(ranks, destination, pair.pruned.path, record, size, as_written) as work:
        work.describe = lambda: describe_saved(work.kept, options.steps)
        if ranks.is_first and not (work.kept / WINDOWS).exists():  # it cuts them for all, once
            pair.require_one_tokenizer()
            read_windows(pair.pruned.path, pair.student.model.config, options).save(work.kept / WINDOWS)
        ranks.wait()
        windows = Windows.load(work.kept / WINDOWS, options)
        with _explained(), _connected(ranks, where):
            outcome, trained = _train(pair, windows, options, rate, work, where, ranks, compiled)
        result = Recovery(destination=str(destination), held_tokens=windows.held.numel(), **outcome)
        if ranks.is_first:
            if files.not_copied:
                say(f"not copied, other weights or code: {', '.join(files.not_copied)}")
            # Of texts the names alone: the folder may be published, and paths are this machine's.
            named = {**asdict(told), "texts": [*map(without_folder, told.texts)]}
            said = {"compiled": compiled, "held_tokens": result.held_tokens, **outcome}
            write_result(work, pair.pruned, files, trained, {**record, "options": named, **said})
    return result


class _Pair:
    def __init__(self, pruned: Path, dense: Path, options: RecoverOptions) -> None:
        self.pruned, self.dense = Checkpoint(pruned), Checkpoint(dense)
        self.marker = Marker.from_config(self.pruned.config)
        for one in (self.pruned, self.dense):
            if source_quantisation(one.config):
                remedy = "prune with --dtype bf16, recover, and quantise then; --dense is the model of before"
                raise CheckpointError(f"{one.path} is quantised", needed="weights in a float type", remedy=remedy)
        if self.dense.config.get(MARKER_KEY) is not None:
            raise CheckpointError(f"--dense {self.dense.path} is pruned itself", needed="the model of before pruning")
        self.student, self.teacher = (self._meta(one) for one in (self.pruned, self.dense))
        self._require_alike()
        self.prunable = choose_trained(self.student.model, options.train)
        require_pattern(self.pruned.path, self.prunable, lambda name: self.student.read(name, self.pruned.tensor))
        parameters = list(self.student.model.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        self.size = Size(sum(one.numel() for one in parameters), trained, self.student.model.config)
        self.plain = options.dtype is None and not find_experts(self.student.model)
        if options.dtype is not None:
            self._round(options)

    @staticmethod
    def _meta(checkpoint: Checkpoint) -> MetaModel:
        meta = build_meta_model(checkpoint, real_buffers=True)
        refuse_masked(type(meta.model))
        refuse_faults(meta, checkpoint)
        meta.tie()
        model: Any = meta.model
        if not all(callable(getattr(model, f"get_{end}_embeddings", None)) for end in ("input", "output")) or (
            model.get_output_embeddings() is None
        ):
            raise InputError(f"{type(model).__name__} cannot be trained here", needed="a causal language model")
        return meta

    def _require_alike(self) -> None:
        if (got := self._difference()) is not None:
            apart = f"{self.pruned.path} and {self.dense.path} do not belong together"
            raise CheckpointError(apart, got=got, remedy=OF_BEFORE)

    def _difference(self) -> str | None:
        student, teacher = (one.model.state_dict(keep_vars=True) for one in (self.student, self.teacher))
        vocabularies = [vocabulary_of(one.model.config) for one in (self.student, self.teacher)]
        if vocabularies[0] != vocabularies[1]:
            return f"vocabularies of {vocabularies[0]} and {vocabularies[1]} tokens"
        for name in student.keys() & teacher.keys():
            if student[name].shape != teacher[name].shape:
                return f"{name} {list(student[name].shape)} and {list(teacher[name].shape)}"
        other = sorted(student.keys() ^ teacher.keys())
        return f"{other[0]} in one of them alone" if other else None

    def warn_of_another_teacher(self) -> None:
        """Warn of other input embeddings, which pruning leaves as they are; a model trained since may have its own."""
        model: Any = self.student.model
        embedding = model.get_input_embeddings().weight
        name = next(name for name, one in model.state_dict(keep_vars=True).items() if one is embedding)
        both = ((self.student, self.pruned), (self.teacher, self.dense))
        student, teacher = (meta.read(name, one.tensor).bfloat16() for meta, one in both)
        if not torch.equal(student, teacher) and not (self.pruned.path / RECORD).exists():
            told = f"{self.pruned.path} does not seem to come from --dense {self.dense.path}"
            remedy = "ignore this if they were trained since, or if it is intended"
            warnings.warn(f"{told}: its input embeddings differ; {remedy}", SlideSparseWarning, stacklevel=2)

    def require_one_tokenizer(self) -> None:
        """Refuse tokenizers that call tokens otherwise: the dense model would read another text."""
        first, second = (load_tokenizer(one.path).get_vocab() for one in (self.pruned, self.dense))
        if first != second:
            differing = sorted(first.items() ^ second.items(), key=str)[0][0]
            got = f"{differing!r} with {first.get(differing, 'no number')} and {second.get(differing, 'no number')}"
            both = f"{self.pruned.path} and {self.dense.path}"
            raise CheckpointError(f"{both} have tokenizers of other vocabularies", got=got, remedy=OF_BEFORE)

    def _round(self, options: RecoverOptions) -> None:
        """Let the student's linears round as they will be served."""
        marker = Marker.require(self.pruned.config, self.pruned.path)
        if find_experts(self.student.model):
            raise InputError(f"--dtype {options.dtype}", got="a mixture of experts", remedy="leave it out")
        dtype = parse_dtype(options.dtype or "int8")
        recipes = {name: rounding_of(options.recipe, marker.pattern_of(name)) for name in self.student.linears(marker)}
        round_linears_(self.student.model, recipes, dtype)


def _train(
    pair: _Pair, windows: Windows, options: RecoverOptions, rate: float, work: Workplace, device: torch.device,
    ranks: Ranks, compiled: bool,
) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:  # fmt: skip
    """Train, and return what is said of it, and the new tensors, which the first process has."""
    fit = Fit.of_all(ranks.gather(astuple(fit_memory(pair.size, options, ranks.world, device))))
    mesh = init_device_mesh(device.type, (ranks.world,))
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    LOG.info("windows at a time: %d; activations are %s", fit.micro, "computed again" if fit.recompute else "kept")
    # Without dropout: the dense model predicts without it, too.
    dense, student = DenseNetwork(pair.teacher.model).eval(), StudentNetwork(pair.student.model).eval()
    if compiled:
        compile_(student)  # before activations are computed again around it
    if ranks.world > 1:
        divide(dense, mesh, compute)
    divide(student, mesh, compute, fit.recompute)
    fill(dense, pair.teacher, pair.dense.tensor, compute, device)
    dense.requires_grad_(False)
    if device.type == "cuda":
        choose_kernels(dense, windows.held[:1, :16].long().to(device), alone=ranks.world == 1)
    zeros: set[str] = set()

    def look(name: str, value: torch.Tensor) -> None:
        if name in pair.prunable and has_held_zeros(name, value, pair.marker):
            zeros.add(name)

    reader = ExpertReader(pair.pruned, pair.student, "cpu")  # which checks the patterns of experts
    everything = fill(student, pair.student, reader.tensor, torch.float32, device, look)
    dense.require_plain_head(windows.held[:1, :16].long().to(device))
    if compiled:
        compile_(dense)  # only now: what was looked at so far is of other shapes
    parameters = {name: one for name, one in everything.items() if one.requires_grad}
    training = Training(
        student, dense, windows, parameters, zeros & parameters.keys(), options, rate, fit, ranks, device
    )
    state = State(work.kept, parameters, training.optimizer)
    progress = state.load(ranks)
    words = f"{windows.count} windows of {options.window} tokens to train on, {len(windows.held)} to judge by"
    if options.steps is not None:
        through, tokens = options.steps * options.windows / windows.count, options.steps * options.step_tokens
        words += f"; {counted(options.steps, 'step')} of {options.windows} windows, "
        words += "" if tokens == options.tokens else f"{tokens} tokens, "
        words += f"{through:.3g} times through the text" if through >= 1 else f"{100 * through:.3g} % of the text"
    say(words + (f"; goes on after step {progress.step}" if progress.step else ""))
    if not (work.kept / BEFORE).exists():
        before = training.judge()
        if ranks.is_first:
            write_json(work.kept / BEFORE, before)
        ranks.wait()
    before = read_json(work.kept / BEFORE)
    training.run(state, progress)
    state.save(progress, ranks)  # so that a kill from here on loses nothing
    after = training.judge()
    better = after["kl"] < before["kl"]
    told = {
        "kept": "after" if better else "before",
        "steps": progress.step,
        "tokens": progress.step * options.step_tokens,
        "seconds": round(progress.seconds, 3),
        "rate": rate,
        "left_out": progress.left_out,
        "ended_early": progress.in_a_row >= MOST_LEFT_OUT,
        "before": before,
        "after": after,
        "losses": progress.losses,
    }
    return told, gathered(parameters, pair.student, pair.pruned, ranks.is_first) if better else {}


@contextmanager
def _connected(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Let one process that is alone form a group of itself, so that there is one way to train; several have theirs."""
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
    """Explain errors of memory, of transfers to a process that has ended, and of torch.compile."""
    try:
        with explained():
            yield
    except torch.cuda.OutOfMemoryError as error:
        remedy = "use --micro 1, --recompute on, or more GPUs; a run that goes on may have others"
        raise UnsupportedError("the memory of a GPU is too small", got=first_line(error), remedy=remedy) from error
    except RuntimeError as error:
        if (inner := getattr(error, "inner_exception", None)) is None:  # which errors of torch.compile have
            raise
        got, remedy = first_line(inner), "set TORCH_COMPILE_DISABLE=1; training takes longer then"
        raise UnsupportedError("PyTorch cannot compile the model", got=got, remedy=remedy) from error
