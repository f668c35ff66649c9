"""Optimizers: the fused AdamW, the 8-bit one, their state in memory and in checkpoints."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from quintain import ConfigError, GRPOConfig, GRPOTrainer
from quintain.checkpoints.state import pack, unpack
from quintain.trainers.optim import Optimization, build_optimization, build_optimizers, state_bytes

SHAPES = {
    "language_model.embed_tokens.weight": (96, 64),
    "language_model.layer.weight": (64, 128),
    "language_model.norm.weight": (64,),
}
has_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
EIGHT_BIT = pytest.param("adamw_8bit", marks=has_bitsandbytes)


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def config(**settings):
    return GRPOConfig(**{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": None, **settings})


def optimization(values, **settings) -> Optimization:
    return build_optimization(config(**settings), values, max_steps=10)


def take_steps(values, optimizer, steps, seed=7):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for value in values.values():
            value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step()
        optimizer.next_rate()


def through_a_checkpoint(optimizer):
    tensors: dict[str, torch.Tensor] = {}
    tree = pack(optimizer.state_dict(), tensors)
    return unpack(tree, tensors)


def test_adamw_is_fused_on_a_cpu():
    (optimizer,) = build_optimizers(config(), parameters())
    assert optimizer.defaults["fused"] is True


def test_the_fused_update_is_the_formula():
    """One number, two steps by hand: m = 0.1 g, v = 0.001 g^2 after bias correction give a first step of -lr * sign."""
    value = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = optimization({"language_model.x": value}, learning_rate=0.1, weight_decay=0.5, adam_epsilon=1e-12)
    value.grad = torch.tensor([-3.0])
    optimizer.step()
    torch.testing.assert_close(value.detach(), torch.tensor([2.0 * (1 - 0.1 * 0.5) + 0.1]))
    value.grad = torch.tensor([1.0])
    before = float(value.detach())
    optimizer.step()
    moment = (0.9 * 0.1 * -3.0 + 0.1 * 1.0) / (1 - 0.9**2)
    spread = (0.999 * 0.001 * 9.0 + 0.001 * 1.0) / (1 - 0.999**2)
    torch.testing.assert_close(value.detach(), torch.tensor([before * (1 - 0.05) - 0.1 * moment / spread**0.5]))


def test_a_transposed_gradient_moves_the_weights_it_belongs_to():
    """The fused kernel reads both as they lie in memory: unmatched, it would update other weights than meant."""
    straight, turned = parameters(), parameters()
    for values, turn in ((straight, False), (turned, True)):
        optimizer = optimization(values, adam_epsilon=1.0)
        for value in values.values():
            gradient = torch.linspace(-1, 1, value.numel()).reshape(value.shape)
            value.grad = gradient.t().contiguous().t() if turn and value.ndim == 2 else gradient
        optimizer.step()
    for name, value in straight.items():
        assert torch.equal(value, turned[name]), name


@pytest.mark.parametrize("optim", ["adamw", EIGHT_BIT, "muon", "lion", "sgd", "adafactor"])
def test_state_that_went_through_a_checkpoint_goes_on_bit_for_bit(optim):
    straight = parameters()
    optimizer = optimization(straight, optim=optim)
    take_steps(straight, optimizer, 2)
    resumed = {name: torch.nn.Parameter(value.detach().clone()) for name, value in straight.items()}
    again = optimization(resumed, optim=optim)
    again.load_state_dict(through_a_checkpoint(optimizer))
    for values, item in ((straight, optimizer), (resumed, again)):
        take_steps(values, item, 3, seed=8)
    for name, value in straight.items():
        assert torch.equal(value, resumed[name]), name


def test_a_checkpoint_of_an_unfused_adamw_loads_and_goes_on_as_it_began():
    """Runs from before, or from another device: their state says how they computed, and that is kept."""
    values = parameters()
    earlier = Optimization(values, [torch.optim.AdamW(values.values(), lr=1e-2, fused=False)], [], max_grad_norm=None)
    take_steps(values, earlier, 2)
    resumed = {name: torch.nn.Parameter(value.detach().clone()) for name, value in values.items()}
    again = Optimization(resumed, build_optimizers(config(), resumed), [], max_grad_norm=None)
    again.load_state_dict(through_a_checkpoint(earlier))
    assert again.optimizers[0].param_groups[0]["fused"] is False
    for tensors, item in ((values, earlier), (resumed, again)):
        take_steps(tensors, item, 3, seed=8)
    assert all(torch.equal(value, resumed[name]) for name, value in values.items())


@pytest.mark.parametrize(
    ("optim", "slack"),
    [("adamw", 1.001), pytest.param("adamw_8bit", 1.5, marks=has_bitsandbytes), ("muon", 1.001), ("lion", 1.001)]
    + [("sgd", 1.0), ("adafactor", 1.05)],
)
def test_the_state_takes_the_memory_that_was_foreseen(optim, slack):
    values = parameters()
    optimizer = optimization(values, optim=optim)
    take_steps(values, optimizer, 1)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for item in optimizer.optimizers
        for state in item.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
    }
    foreseen = state_bytes(optim, values)
    assert foreseen <= sum(held.values()) <= foreseen * slack


@has_bitsandbytes
def test_the_8_bit_state_is_less_than_a_third_and_the_update_nearly_the_same():
    exact, coarse = parameters(), parameters()
    start = parameters()
    for values, optim in ((exact, "adamw"), (coarse, "adamw_8bit")):
        take_steps(values, optimization(values, optim=optim), 5)
    name = "language_model.layer.weight"
    moved, apart = (exact[name] - start[name]).norm(), (exact[name] - coarse[name]).norm()
    assert 0 < apart < 0.1 * moved
    assert state_bytes("adamw_8bit", exact) < state_bytes("adamw", exact) / 3


def test_adamw_8bit_without_its_package_is_refused_before_the_model_loads(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ConfigError, match=r"adamw_8bit.*bitsandbytes.*pip install bitsandbytes.*adamw"):
        GRPOTrainer("no/such-model", lambda completions, **_: [0.0], GRPOConfig(optim="adamw_8bit", max_steps=1))


def test_the_name_that_trl_has_for_the_8_bit_adamw_is_taken():
    assert GRPOConfig(optim="adamw_bnb_8bit").optim == "adamw_8bit"


@has_bitsandbytes
def test_a_run_with_the_8_bit_adamw_resumes_bit_for_bit(make_trainer, tmp_path):
    """Wide enough that its matrices pass 4096 numbers, from which on the state has 8 bits."""
    settings = {
        "optim": "adamw_8bit",
        "max_steps": 4,
        "save_steps": 1,
        "model_init_kwargs": {"characters": "01=", "hidden_size": 64},
    }
    straight = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "straight"))
    straight.train()
    broken = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "broken"))
    broken.max_steps = 2
    broken.train()
    resumed = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "broken"))
    resumed.train(resume_from=tmp_path / "broken")
    states = [state for item in resumed.optimizer.optimizers for state in item.state.values()]
    assert any(tensor.dtype == torch.uint8 for state in states for tensor in state.values() if torch.is_tensor(tensor))
    whole, again = straight.policies.state_dict(), resumed.policies.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
