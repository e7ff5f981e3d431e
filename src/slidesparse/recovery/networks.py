"""Networks of a run: the pruned student, which is trained, and the dense model, which it is trained toward.

FSDP2 divides both among the processes, layer by layer, and the embeddings and the last norm with the root. The student
keeps float32 weights, and multiplies in BF16 on a GPU. The dense model has BF16 weights alone; a single process does
not divide it, since nothing would be gained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recomputed

from slidesparse.base.torch_private import compile_forms
from slidesparse.checkpoints.check_tensors import check_finite
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import CheckpointError, InputError, first_line
from slidesparse.models.hooks import hooked
from slidesparse.models.parts import text_config
from slidesparse.recovery.loss import Predictions, compare, distillation, divergence


class Network(nn.Module):
    """Causal language model of transformers that returns hidden states and output embedding in place of logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cap = getattr(text_config(model.config), "final_logit_softcapping", None)

    @property
    def decoder(self) -> Any:
        """The part of the model that computes hidden states."""
        return getattr(self.model, "get_decoder", lambda: self.model.base_model)()

    def predictions(self, ids: torch.Tensor) -> Predictions:
        """Return the predictions for tokens int64 [windows, window]: a row for each token."""
        hidden, head = self.decoder(input_ids=ids, use_cache=False)[0], self.model.get_output_embeddings()
        return Predictions(hidden.flatten(0, 1), head.weight, self.cap, getattr(head, "bias", None))


class DenseNetwork(Network):
    """Dense model: no gradients."""

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> Predictions:
        """Return the predictions for tokens int64 [windows, window]."""
        return self.predictions(ids)

    @torch.no_grad()
    def require_plain_head(self, ids: torch.Tensor) -> None:
        """Refuse a model whose logits are not the output embedding of its hidden states, or are not finite.

        One pass shows what the parts read and give, to the bit: some models scale logits or hidden states in between.

        Raises:
            InputError: The logits are another function of the hidden states.
            CheckpointError: Some are NaN or Inf.
        """
        what, seen = f"{type(self.model).__name__} cannot be trained here", dict[str, torch.Tensor]()

        def see_decoder(_: Any, args: Any, out: Any) -> None:
            seen["hidden"] = out[0]

        def see_head(_: Any, args: Any, out: Any) -> None:
            seen["read"], seen["given"] = args[0], out

        head = self.model.get_output_embeddings()
        try:
            self(ids)  # several processes gather the output embedding
            hooks = [self.decoder.register_forward_hook(see_decoder), head.register_forward_hook(see_head)]
            with hooked(hooks):
                logits = self.model(input_ids=ids, use_cache=False).logits
        except (AttributeError, TypeError, ValueError) as error:  # a model of another kind
            raise InputError(what, got=first_line(error), needed="a causal language model") from error
        if not bool(logits.isfinite().all()):
            raise CheckpointError(f"{type(self.model).__name__} of --dense predicts NaN or Inf", needed="finite logits")
        given = seen["given"] if "given" in seen else logits.new_zeros(0)
        given = given if self.cap is None else self.cap * torch.tanh(given / self.cap)
        read, hidden = (seen.get(name, given) for name in ("read", "hidden"))
        if not (torch.equal(given.float(), logits.float()) and torch.equal(read, hidden)):
            got = "logits that are not the product of hidden state and output embedding"
            raise InputError(what, got=got, needed="a model that does not scale its logits")


class StudentNetwork(Network):
    """Pruned model. Its forward computes the loss, since there FSDP2 has gathered the output embedding."""

    divergence = staticmethod(divergence)

    def forward(self, ids: torch.Tensor, dense: Predictions, counted: int | None = None) -> torch.Tensor:
        """Return KL(dense || student) summed over tokens, for ids int64 [windows, window]: a float32 scalar.

        With ``counted``, return the sums of :func:`compare` over the first ``counted`` windows instead.
        """
        student = self.predictions(ids)
        if counted is None:
            return distillation(student, dense, by=self.divergence)
        tokens = counted * ids.shape[1]
        return compare(student.first(tokens), dense.first(tokens), ids[:counted])


def divide(network: Network, mesh: DeviceMesh, compute: torch.dtype, gradient_checkpointing: bool = False) -> None:
    """Divide a network on the meta device, its shared weights tied, among processes; it multiplies in ``compute``."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    shard: Callable[..., Any] = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for layer in repeated_layers(network.model):
        if gradient_checkpointing:
            layer.forward = partial(recomputed, layer.forward, use_reentrant=False)
        shard(layer, reshard_after_forward=mesh.size() > 1)
    shard(network, reshard_after_forward=False)


def compiles(device: torch.device) -> bool:
    """Return whether to compile networks: on an H100 a step of a 0.5 B model takes 1.6 times as long without."""
    return device.type == "cuda" and os.environ.get("TORCH_COMPILE_DISABLE") != "1"


def compile_(network: Network) -> None:
    """Compile a network in place: its layers, which share their code, and the loss."""
    compile_forms(64)  # of both networks, whose layers may be of several kinds
    # Only forward, without FSDP2's hooks around a layer. Each size has its own code, whatever their order, so that a
    # resumed run has the same bytes.
    for layer in repeated_layers(network.model):
        layer.forward = torch.compile(layer.forward, dynamic=False)
    if isinstance(network, StudentNetwork):
        network.divergence = torch.compile(divergence, dynamic=False)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the module list with most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=[]))


def fill(
    network: Network,
    meta: MetaModel,
    tensor: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    look: Callable[[str, torch.Tensor], None] = lambda *_: None,
) -> dict[str, nn.Parameter]:
    """Fill a network, divided or not, with a checkpoint's values, each process with its part; return the parameters.

    ``tensor`` reads one of the checkpoint's tensors. ``look`` is called with the name and value of each tensor of the
    state, whole and on the CPU.
    """
    model = network.model
    values: dict[str, torch.Tensor] = {}
    for name, empty in model.state_dict(keep_vars=True).items():
        if name not in meta.filled:
            continue
        value = meta.read(name, tensor)
        check_finite(value, name)
        look(name, value)
        value = value.to(dtype) if value.is_floating_point() else value
        if isinstance(empty, DTensor):
            values[name] = distribute_tensor(value.to(device), empty.device_mesh, empty.placements, src_data_rank=None)
        else:
            values[name] = value.to(device)
    model.load_state_dict(values, strict=False, assign=True)
    meta.tie()
    for module in model.modules():  # rotary tables, which no checkpoint holds
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return dict(model.named_parameters())


def reshard(network: Network) -> None:
    """Divide a network again after a forward pass, so that its parameters are the float32 ones."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
