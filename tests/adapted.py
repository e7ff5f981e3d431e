"""A linear with an adapter, as PEFT has it."""

from __future__ import annotations

import torch
from torch import nn


class Adapted(nn.Module):
    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, 32, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(32, linear.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
