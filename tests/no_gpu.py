"""A machine whose driver is too old for torch."""


def too_old() -> None:
    """``torch.cuda.init()`` there."""
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")
