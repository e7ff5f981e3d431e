"""``slidesparse.prune``: the command as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from slidesparse.base.arguments import list_of_names, require_plain
from slidesparse.base.device import usable_device
from slidesparse.errors import InputError
from slidesparse.files.hub import source_folder
from slidesparse.files.source_files import Links
from slidesparse.models.parts import Part
from slidesparse.offline.calibrate.calibration import Calibration, calibration_for
from slidesparse.offline.dry_run import DryRun
from slidesparse.offline.dry_run import dry_run as estimate
from slidesparse.offline.outcome import PruneSummary
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions, PruneRounding, check_options

Texts: TypeAlias = str | Path | Sequence[str | Path]


def prune(
    source: str | Path,
    destination: str | Path,
    pattern: str = "6:8",
    *,
    dtype: str | None = PruneOptions.dtype,
    method: str = PruneOptions.method,
    match_steps: int = PruneOptions.match_steps,
    smooth: bool = PruneOptions.smooth,
    calibration: Texts | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    bos: bool = True,
    rounding: PruneRounding = PruneOptions.rounding,
    ignore: Sequence[str] = PruneOptions.ignore,
    layers: Mapping[str, str] | None = None,
    lm_head: bool = PruneOptions.lm_head,
    part: Part = PruneOptions.part,
    links: Links = "refuse",
    device: str | torch.device | None = None,
    revision: str | None = None,
    dry_run: bool = False,
) -> PruneSummary | DryRun:
    """Prune and quantise a Hugging Face checkpoint into a new folder, as ``slidesparse prune`` does.

    The source is never touched, and an interrupted call is resumed by the same call.

    Args:
        source: A folder with ``config.json`` and safetensors, or ``NAMESPACE/NAME`` of the hub.
        destination: The folder to make.
        pattern: ``6:8``, ``4:6``, ``2:4``, ... of all linears.
        dtype: ``int8``, ``fp8``, or a float type to prune only; None: ``int8``, or that of a quantised source.
        method: ``sparsegpt``, ``wanda`` or ``magnitude``.
        match_steps: Training steps of each pruned layer towards the dense one's outputs: 200, or 0 for none.
        smooth: Fold outliers of activations into weights before calibrated ones are rounded to INT8.
        calibration: Text for SparseGPT and Wanda, like the model's use: a ``.txt``, ``.jsonl`` or ``.parquet`` file, a
            folder or a data set; or several, each of which may end in ``:WEIGHT``. None: Python's
            standard library.
        samples: Calibration windows; None: 128.
        length: Tokens of a calibration window; None: 2048, or as many as the model can read.
        seed: Seed of the choice of windows; None: 0.
        bos: Begin each window with the tokenizer's special tokens, such as BOS.
        rounding: Rounding of INT8 weights: ``absmax``, ``6bit``, or ``ternary``.
        ignore: Linears to leave alone: names, or ``re:`` and a regular expression.
        layers: Other patterns for some linears: name or ``re:`` expression -> pattern.
        lm_head: Treat the output embedding too.
        part: The part of a multimodal model to treat: ``language``, ``vision`` or ``all``.
        links: Links that lead out of the source: ``refuse``, ``copy`` or ``skip``.
        device: ``cpu`` or ``cuda``; None: a GPU when there is one.
        revision: Branch, tag or commit of a model of the hub; None: its main branch.
        dry_run: Write nothing, and return the plan.

    Returns:
        The outcome; ``describe()`` is what the command prints, and ``to_json()`` what it prints with ``--json``.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option or a path cannot be used.
        UnsupportedError: There is no such device here.

    Example::

        import slidesparse as ss

        done = ss.prune("./Qwen2.5-7B", "./Qwen2.5-7B-6of8", "6:8", calibration="text.txt")
        print(done.describe())
    """
    require_plain(prune, locals())
    windows = {"samples": samples, "length": length, "seed": seed, "bos": None if bos else False}
    options = PruneOptions(
        pattern,
        dtype=dtype,
        method=method,
        match_steps=match_steps,
        smooth=smooth,
        calibration=_calibration(calibration, method, {name: one for name, one in windows.items() if one is not None}),
        rounding=rounding,
        ignore=tuple(list_of_names(ignore, "ignore")),
        layers={} if layers is None else layers,
        lm_head=lm_head,
        part=part,
    )
    check_options(options)  # before a model of the hub is fetched
    folder, where = source_folder(source, revision), usable_device(device)
    if dry_run:
        return estimate(folder, destination, options, device=where, links=links)
    return prune_checkpoint(folder, destination, options, device=where, links=links)


def _calibration(texts: Texts | None, method: str, windows: dict[str, Any]) -> Calibration | None:
    """Return the calibration of a method; None where it needs none."""
    if texts is None:
        return calibration_for(method, [], windows)
    files = [str(texts)] if isinstance(texts, str | Path) else [*map(str, list_of_names(texts, "calibration"))]
    if not files:
        raise InputError("calibration", got="an empty list", needed="a text, or None for the usual one")
    return calibration_for(method, files, windows)
