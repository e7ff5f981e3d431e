"""Tell that a checkpoint lacks weights since a quantiser has stored them in another form, which we do not read."""

from __future__ import annotations

from slidesparse.errors import CheckpointError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.marker import FROM_FLOAT, is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.models.config_keys import MARKER_KEY

QUANTISER_FILES = ("quantize_config.json", "quant_config.json")
"""Where GPTQ and AWQ wrote their settings before these had a key in config.json."""

QUANTISER_TENSORS = (".qweight", ".qzeros")
"""Ends of the names of their tensors."""


def other_quantisation(checkpoint: Checkpoint) -> CheckpointError | None:
    """Return the error that names the quantisation of a checkpoint that lacks weights; None where nothing shows one."""
    config = checkpoint.config
    try:
        if not is_bitnet(config):
            quantisation_dtype(config)
    except CheckpointError as error:
        return error
    signs = [] if source_quantisation(config) or MARKER_KEY in config else _signs(checkpoint)
    if not signs:
        return None
    return CheckpointError(
        "quantisation of the source",
        got=f"{' and '.join(signs)}, as GPTQ and AWQ write them",
        needed="none, or compressed-tensors W8A8",
        remedy=FROM_FLOAT,
    )


def _signs(checkpoint: Checkpoint) -> list[str]:
    """Return what shows GPTQ or AWQ without a key: settings in a file of their own, and one of the tensors."""
    files = [name for name in QUANTISER_FILES if (checkpoint.path / name).is_file()]
    return files + [name for name in checkpoint.files if name.endswith(QUANTISER_TENSORS)][:1]
