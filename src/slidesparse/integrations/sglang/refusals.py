"""Refuse SGLang's options that sparse layers do not support, before anything is loaded."""

from __future__ import annotations

from typing import Any

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.refusals import RANDOM, SAVED, refuse_load_format, refuse_offloading

SERVE_DENSE = "serve dense, without the plugin (SGLANG_PLUGINS=none)"

LOAD_FORMATS = {"dummy": RANDOM, "presharded": SAVED, "remote_instance": SAVED, "sharded_state": SAVED}
"""Unsuitable ``--load-format`` -> its contents in place of a checkpoint's weights."""

TENSORS_KEPT = "redis:"
"""Prefix of addresses where ``--load-format remote`` finds another engine's tensors; others have files."""


def refuse_what_cannot_work(arguments: Any) -> None:
    """Raise an UnsupportedError for arguments of a server that sparse layers do not support."""
    of_engine = {"remote": SAVED} if str(getattr(arguments, "model_path", "")).startswith(TENSORS_KEPT) else {}
    refuse_load_format(getattr(arguments, "load_format", "auto"), LOAD_FORMATS | of_engine, SERVE_DENSE)
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        got = "--enable-lora or --lora-paths"
        raise UnsupportedError("LoRA adapters on sparse layers", got=got, remedy=SERVE_DENSE)
    if getattr(arguments, "enable_memory_saver", None) and not getattr(arguments, "enable_weights_cpu_backup", None):
        got = "--enable-memory-saver, which drops weights that cannot be loaded again"
        remedy = f"add --enable-weights-cpu-backup, or {SERVE_DENSE}"
        raise UnsupportedError("sparse layers whose memory is released", got=got, remedy=remedy)
    names = ("cpu_offload_gb", "offload_group_size")
    sizes = {f"--{name.replace('_', '-')}": getattr(arguments, name, None) or 0 for name in names}
    refuse_offloading(sizes, SERVE_DENSE)


def largest_batch(arguments: Any) -> int:
    """Return the tokens of a server's largest batch by its arguments, or 0."""
    chunk = getattr(arguments, "chunked_prefill_size", None) or 0
    return chunk if chunk > 0 else getattr(arguments, "max_prefill_tokens", None) or 0
