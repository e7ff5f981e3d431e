"""The two checkpoints of a run, checked to belong together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from slidesparse.checkpoints.check_tensors import refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker, source_quantisation
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import CheckpointError, InputError, SlideSparseWarning
from slidesparse.models.causal import require_causal, vocabulary_of
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.experts import find_experts
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.recovery.memory import Size
from slidesparse.recovery.options import RecoverOptions
from slidesparse.recovery.result import RECORD
from slidesparse.recovery.rounding import round_linears_
from slidesparse.recovery.trained import choose_trained, require_pattern
from slidesparse.weights.quant import parse_dtype, rounding_of

ORIGINAL = "let --dense name the model before pruning"


class Pair:
    """A pruned checkpoint and its dense one, with their models on the meta device.

    Attributes:
        pruned: The pruned checkpoint, with its ``marker``, and ``student`` its model.
        dense: The dense checkpoint, and ``teacher`` its model.
        prunable: Names of the student's parameters that pruning may have treated.
        size: Size of the student.
        compilable: Whether training can be compiled: not with experts or rounding.

    Raises:
        CheckpointError: A checkpoint cannot be used, or the two do not belong together.
        InputError: The checkpoint is not pruned, the model cannot be trained, or an option does not suit it.
    """

    def __init__(self, pruned: Path, dense: Path, options: RecoverOptions) -> None:
        self.pruned, self.dense = Checkpoint(pruned), Checkpoint(dense)
        self.marker = Marker.from_config(self.pruned.config)
        for one in (self.pruned, self.dense):
            if source_quantisation(one.config):
                remedy = "prune with --dtype bf16, recover, then quantise; --dense is the model before pruning"
                raise CheckpointError(f"{one.path} is quantised", needed="weights in a float type", remedy=remedy)
        if self.dense.config.get(MARKER_KEY) is not None:
            raise CheckpointError(f"--dense {self.dense.path} is pruned itself", needed="the model before pruning")
        self.student, self.teacher = (_meta_model(one) for one in (self.pruned, self.dense))
        if (got := self._difference()) is not None:
            raise CheckpointError(f"{pruned} and {dense} do not belong together", got=got, remedy=ORIGINAL)
        self.prunable = choose_trained(self.student.model, options.train)
        require_pattern(self.pruned.path, self.prunable, lambda name: self.student.read(name, self.pruned.tensor))
        parameters = list(self.student.model.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        self.size = Size(sum(one.numel() for one in parameters), trained, self.student.model.config)
        self.compilable = options.dtype is None and not find_experts(self.student.model)
        if options.dtype is not None:
            self._round(options)

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
        """Warn of different input embeddings, which pruning does not change, but later training may."""
        model: Any = self.student.model
        embedding = model.get_input_embeddings().weight
        name = next(name for name, one in model.state_dict(keep_vars=True).items() if one is embedding)
        both = ((self.student, self.pruned), (self.teacher, self.dense))
        student, teacher = (meta.read(name, one.tensor).bfloat16() for meta, one in both)
        if not torch.equal(student, teacher) and not (self.pruned.path / RECORD).exists():
            doubt = f"{self.pruned.path} does not seem to come from --dense {self.dense.path}"
            remedy = "ignore this if they were trained since, or if it is intended"
            warnings.warn(f"{doubt}: its input embeddings differ; {remedy}", SlideSparseWarning, stacklevel=2)

    def require_one_tokenizer(self) -> None:
        """Refuse tokenizers of different vocabularies: the dense model would read another text."""
        first, second = (load_tokenizer(one.path).get_vocab() for one in (self.pruned, self.dense))
        if first != second:
            differing = sorted(first.items() ^ second.items(), key=str)[0][0]
            got = f"{differing!r} with {first.get(differing, 'no number')} and {second.get(differing, 'no number')}"
            both = f"{self.pruned.path} and {self.dense.path}"
            raise CheckpointError(f"{both} have tokenizers of other vocabularies", got=got, remedy=ORIGINAL)

    def _round(self, options: RecoverOptions) -> None:
        """Make the student's linears round as when served."""
        marker = Marker.require(self.pruned.config, self.pruned.path)
        if find_experts(self.student.model):
            remedy = "leave out --dtype and --rounding"
            raise InputError(f"--dtype {options.dtype}", got="a mixture of experts", remedy=remedy)
        dtype = parse_dtype(options.dtype or "int8")
        linears = self.student.linears(marker)
        roundings = {name: rounding_of(options.rounding, marker.pattern_of(name), marker.pattern) for name in linears}
        round_linears_(self.student.model, roundings, dtype)


def _meta_model(checkpoint: Checkpoint) -> MetaModel:
    """Return the causal language model of a checkpoint on the meta device; an InputError for other models."""
    meta = build_meta_model(checkpoint, real_buffers=True)
    require_causal(type(meta.model), getattr(meta.model, "config", None))
    refuse_faults(meta, checkpoint)
    meta.tie()
    model: Any = meta.model
    has_both = all(callable(getattr(model, f"get_{end}_embeddings", None)) for end in ("input", "output"))
    if not has_both or model.get_output_embeddings() is None or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{type(model).__name__} cannot be trained here", needed="a causal language model")
    return meta
