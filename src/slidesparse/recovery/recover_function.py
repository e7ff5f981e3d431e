"""``slidesparse.recover``: the command as a function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from slidesparse.base.arguments import list_of_names, require_plain
from slidesparse.base.device import usable_device
from slidesparse.errors import InputError
from slidesparse.files.hub import source_folder
from slidesparse.recovery import run
from slidesparse.recovery.options import GradientCheckpointing, RecoverOptions, Trained, parse_amount
from slidesparse.recovery.outcome import Recovery
from slidesparse.weights.quant import QuantName, Rounding


def recover(
    pruned: str | Path,
    dense: str | Path,
    destination: str | Path,
    *,
    texts: str | Path | Sequence[str | Path],
    tokens: int | str | None = None,
    minutes: float | None = None,
    lr: float | None = RecoverOptions.lr,
    batch: int | str = RecoverOptions.batch,
    window: int = RecoverOptions.window,
    eval_windows: int = RecoverOptions.eval_windows,
    seed: int = RecoverOptions.seed,
    train: Trained = RecoverOptions.train,
    dtype: QuantName | None = RecoverOptions.dtype,
    rounding: Rounding = RecoverOptions.rounding,
    bos: bool = RecoverOptions.bos,
    micro_batch: int = RecoverOptions.micro_batch,
    gradient_checkpointing: GradientCheckpointing = RecoverOptions.gradient_checkpointing,
    save_minutes: float = RecoverOptions.save_minutes,
    device: str | torch.device | None = None,
    revision: str | None = None,
    dense_revision: str | None = None,
) -> Recovery:
    """Train a pruned checkpoint toward the dense model, its zeros held, as ``slidesparse recover`` does.

    It runs in one process on one device; for several GPUs run the command under torchrun.

    Args:
        pruned: A checkpoint that ``prune`` wrote in a float type: a folder, or ``NAMESPACE/NAME`` of the hub.
        dense: The model before pruning, likewise.
        destination: The folder to make.
        texts: Texts and chats to train on, like those of ``prune``; each may end in ``:WEIGHT``.
        tokens: Budget in tokens, such as ``"20M"``.
        minutes: Budget in minutes of training; with both, whichever is spent first.
        lr: Peak learning rate; None: 9e-6 x 2048 / the model's width.
        batch: Tokens of a step.
        window: Tokens of a text window.
        eval_windows: Text windows kept out of training, to evaluate on.
        seed: Seed of the training order, and of the choice of evaluation windows.
        train: ``body``, all but input and output embeddings; ``linears`` of the layers alone; or ``all``.
        dtype: ``int8`` or ``fp8``: round weights and activations in training as when served.
        rounding: Rounding of INT8 weights.
        bos: Begin each window with the tokenizer's special tokens, such as BOS.
        micro_batch: Most windows in one forward pass of a GPU.
        gradient_checkpointing: Recompute activations in the backward pass: ``on``, ``off``, or ``auto`` where memory
            needs it.
        save_minutes: Minutes between saved states, from which an interrupted call resumes.
        device: ``cpu`` or ``cuda``; None: a GPU when there is one.
        revision: Branch, tag or commit of the pruned model on the hub; None: its main branch.
        dense_revision: The same of the dense one, required with ``revision``.

    Returns:
        The outcome; ``describe()`` is what the command prints, and ``to_json()`` what it prints with ``--json``.

    Raises:
        CheckpointError: A checkpoint cannot be used, or the two do not belong together; the disk is full.
        InputError: A text, an option or a path cannot be used.
        UnsupportedError: There is no such device, or its memory is too small.

    Example::

        import slidesparse as ss

        done = ss.recover("./pruned", "./Qwen2.5-7B", "./recovered", tokens="20M", texts=["text.txt"])
        print(done.describe())
    """
    require_plain(recover, locals())
    files = [texts] if isinstance(texts, str | Path) else list_of_names(texts, "texts")
    options = RecoverOptions(
        texts=tuple(map(str, files)),
        tokens=parse_amount(tokens) if isinstance(tokens, str) else tokens,
        minutes=minutes,
        lr=lr,
        batch=parse_amount(batch, "--batch") if isinstance(batch, str) else batch,
        window=window,
        eval_windows=eval_windows,
        seed=seed,
        train=train,
        dtype=dtype,
        rounding=rounding,
        bos=bos,
        micro_batch=micro_batch,
        gradient_checkpointing=gradient_checkpointing,
        save_minutes=save_minutes,
    )
    base = dense_folder(dense, dense_revision, revision)
    return run.recover(source_folder(pruned, revision), base, destination, options, device=usable_device(device))


def dense_folder(dense: str | Path, revision: str | None, pruned_revision: str | None) -> Path:
    """Return the folder of the dense model.

    Where the pruned one has a revision, a dense one of the hub needs its own: its main branch may have moved on.
    """
    if pruned_revision is not None and revision is None and not os.path.lexists(dense):
        got, needed = f"--revision {pruned_revision}, which is the pruned model's", "the revision of --dense as well"
        remedy = "add --dense-revision: main, or the one from which the pruned model was made"
        raise InputError(f"revision of {dense}", got=got, needed=needed, remedy=remedy)
    return source_folder(dense, revision)
