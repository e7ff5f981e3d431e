"""Training on with the zeros held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SMALL, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slidesparse.errors import InputError
from slidesparse.models.held_zeros import HeldZeros
from slidesparse.models.targets import find_targets
from slidesparse.pruning import prune_mask
from slidesparse.weights.support import check_pattern


def pruned_model() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    for linear in find_targets(model).linears.values():
        linear.weight.data *= prune_mask(linear.weight.detach(), "6:8")
    return model


def train(model: Any, held: HeldZeros | None, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if held is not None:
            held.apply_()
        losses.append(float(loss.detach()))
    return losses


def test_zeros_stay_and_the_rest_learns() -> None:
    model = pruned_model()
    before = copy.deepcopy(model.state_dict())
    losses = train(model, HeldZeros(model))
    assert losses[-1] < 0.9 * losses[0]
    for name, linear in find_targets(model).linears.items():
        check_pattern(linear.weight.detach(), "6:8", name=name)
        zeros = before[f"{name}.weight"] == 0
        assert torch.equal(linear.weight == 0, zeros)
        assert not torch.equal(linear.weight, before[f"{name}.weight"])


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Train a model with its zeros held; return where the weights of before were zero and those of after are not."""
    before = copy.deepcopy(model.state_dict())
    train(model, HeldZeros(model), steps=2)
    return {
        name: filled for name, w in model.state_dict().items() if bool((filled := (before[name] == 0) & (w != 0)).any())
    }


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_the_zeros_of_experts_stay(family: str) -> None:
    sizes = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    experts = {name: weight for name, weight in model.named_parameters() if weight.dim() == 3}
    assert len(experts) == 4
    for weight in experts.values():
        for one in weight.detach():
            one *= prune_mask(one, "6:8")
    before = copy.deepcopy(model.state_dict())
    assert trained(model) == {}
    assert not any(torch.equal(weight, before[name]) for name, weight in experts.items())


def test_the_zeros_of_linears_that_share_a_weight_stay() -> None:
    first, second = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    first.weight.data *= prune_mask(first.weight.detach(), "6:8")
    zeros, second.weight = first.weight.detach() == 0, first.weight
    held = HeldZeros(torch.nn.Sequential(first, second))
    first.weight.data += 1
    held.apply_()
    assert torch.equal(first.weight == 0, zeros)


def test_an_adapter_that_begins_as_zero_learns() -> None:
    """LoRA's second matrix does, and no pattern prunes all of a weight."""
    linear, adapter = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(32, 64, bias=False)
    linear.weight.data *= prune_mask(linear.weight.detach(), "6:8")
    torch.nn.init.zeros_(adapter.weight)
    model = torch.nn.ModuleDict({"linear": linear, "adapter": adapter})
    assert list(HeldZeros(model).zeros) == ["linear"]


def test_callback_of_the_trainer(tmp_path: Any) -> None:
    model = pruned_model()
    data = [{"input_ids": row, "labels": row} for row in tokens().repeat(4, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    before = model.model.layers[1].mlp.down_proj.weight.detach().clone()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[HeldZeros(model).callback()])
    trainer.train()
    after = model.model.layers[1].mlp.down_proj.weight.detach()
    assert not torch.equal(after, before)
    assert torch.equal(after == 0, before == 0)


def test_a_model_that_moves_is_held_where_it_went() -> None:
    """Trainer brings the model to its device after the callback was made; here the device is the meta one."""
    model = pruned_model()
    held = HeldZeros(model)
    model.to("meta")
    held.apply_()
    assert {zero.device.type for zero in held.zeros.values()} == {"meta"}


def test_a_parameter_that_was_replaced_is_held() -> None:
    model = pruned_model()
    held, linear = HeldZeros(model), model.model.layers[0].mlp.up_proj
    zeros = linear.weight.detach() == 0
    linear.weight = torch.nn.Parameter(torch.ones_like(linear.weight))
    linear.weight.data[0, int(zeros[0].nonzero()[0])] = torch.nan  # a loss that overflowed once
    held.apply_()
    assert torch.equal(linear.weight == 0, zeros)


@pytest.mark.parametrize("held_first", [False, True])
def test_a_model_that_is_cut_over_processes_is_held(held_first: bool) -> None:
    """Here over one: the weights are distributed tensors all the same."""
    model = pruned_model()
    zeros = {name: linear.weight.detach() == 0 for name, linear in find_targets(model).linears.items()}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        held = HeldZeros(model) if held_first else None
        for part in [*model.model.layers, model]:
            fully_shard(part, mesh=mesh)
        train(model, held or HeldZeros(model), steps=2)
        for name, zero in zeros.items():
            assert torch.equal(model.get_submodule(name).weight.full_tensor() == 0, zero)
    finally:
        torch.distributed.destroy_process_group()


def test_an_embedding_keeps_no_zeros() -> None:
    """The row of a padding token is zero and trained where the output embedding shares it."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
    model.model.embed_tokens.weight.data[0] = 0
    with pytest.raises(InputError, match="no zeros to hold"):
        HeldZeros(model)
    with pytest.raises(InputError, match="model; got None"):
        HeldZeros(None)  # type: ignore[arg-type]


def test_a_weight_that_cannot_be_held_is_refused() -> None:
    """What is written into a computed weight is lost; one of another shape may be the part that is left here."""
    for said in ("cannot train model.layers.0.mlp.up_proj; got a weight that is computed", r"shape of .*; got \[0\]"):
        model = pruned_model()
        held, linear = HeldZeros(model), model.model.layers[0].mlp.up_proj
        if "computed" in said:
            torch.nn.utils.parametrizations.weight_norm(linear)
        else:
            linear.weight = torch.nn.Parameter(torch.ones(0))
        with pytest.raises(InputError, match=said):
            held.apply_()
        if "computed" in said:
            with pytest.raises(InputError, match=said):
                HeldZeros(model)
