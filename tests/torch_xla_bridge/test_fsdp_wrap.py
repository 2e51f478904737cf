"""Wrap policies, checkpointing of modules, and the names around torch_xla's first FSDP."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_xla_bridge.torch_xla.distributed import fsdp
from isoshard.torch_xla_bridge.torch_xla.distributed.fsdp import checkpoint_module, utils
from isoshard.torch_xla_bridge.torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Wrapper(nn.Module):
    """Notes how it was made."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module = module
        self.options = options


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8),  # 40 elements
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),  # 72
        nn.ModuleList([nn.Linear(8, 2, bias=False)]),  # 16
    )


def wrapped(policy: Any, module: nn.Module | None = None, **options: Any) -> tuple[list[str], int]:
    """The names of what a policy wraps, and the count."""
    root, count = recursive_wrap(module or model(), policy, Wrapper, set(), set(), **options)
    names = [n for n, m in root.named_modules() if isinstance(m, Wrapper)]
    return [name.replace("module.", "").replace(".module", "") for name in names], count


def test_each_policy_wraps_what_it_says():
    assert wrapped(always_wrap_policy) == (["", "0", "1", "1.0", "1.1", "2", "2.0"], 128)
    assert wrapped(always_wrap_policy, only_wrap_children=True)[0][0] == "0"
    linear = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    assert wrapped(linear) == (["0", "1.0", "2.0"], 128)
    relu = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.ReLU))
    assert wrapped(relu) == (["1.1"], 0)
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=16)
    # What is left of a module when its children are wrapped must be large as well.
    assert wrapped(by_size) == (["0", "1.0", "2.0"], 128)
    assert wrapped(functools.partial(by_size, min_num_params=50)) == (["", "1.0"], 128)
    assert wrapped(functools.partial(by_size, min_num_params=1000)) == ([], 0)


def test_the_size_policy_has_leaves_and_exclusions():
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=10)
    assert wrapped(by_size, attention)[0] == [""], "not looked into, and so not wrapped"
    inside = functools.partial(by_size, force_leaf_modules=set())
    assert wrapped(inside, nn.Sequential(nn.MultiheadAttention(4, 2)))[0] == ["0", "0.out_proj"]
    without = functools.partial(by_size, exclude_wrap_modules={nn.Linear})
    assert wrapped(without)[0] == ["", "1", "2"]
    assert nn.ModuleList in size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert nn.MultiheadAttention in size_based_auto_wrap_policy.FORCE_LEAF_MODULES


def test_a_module_in_two_places_is_wrapped_once():
    shared = nn.Linear(4, 4)
    root = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared})
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    root, count = recursive_wrap(root, policy, Wrapper, set(), set())
    assert root["a"] is root["c"] is root["b"][0] and isinstance(root["a"], Wrapper)
    assert count == 20
    root = nn.Sequential(nn.Sequential(Wrapper(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match=r"0\.0 is a Wrapper already; wrap modules either"):
        recursive_wrap(root, always_wrap_policy, Wrapper, set(), set())


def test_options_overrides_and_what_is_ignored():
    root = model()
    root[1]._wrap_overrides = {"mode": "special"}
    ignored, uncounted = root[2], root[0].bias
    counts: list[int] = []

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        if module is root and recurse:
            counts.append(unwrapped_params)
        return True

    new, _ = recursive_wrap(
        root, policy, Wrapper, {ignored}, {uncounted}, only_wrap_children=True, mode="usual", n=1
    )
    assert new[0].options == {"mode": "usual", "n": 1}
    assert new[1].options == {"mode": "special", "n": 1}
    assert new[2] is ignored and counts == [128 - 8]


# --- Checkpointing --------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, extra: Any = None, *, scale: float = 1.0) -> Any:
        y = x + self.b(torch.nn.functional.gelu(self.a(x))) * scale
        return {"out": y, "extra": None if extra is None else y * extra["w"]}


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def gradients(device: str, change: Any, *, leaf: bool = True) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.ModuleList(change(Layer()) for _ in range(2)).to(device)
    x = data(4, 6).to(device).requires_grad_(leaf)
    w = data(6).to(device).requires_grad_()
    torch.manual_seed(5)
    y = x
    for layer in layers:
        y = layer(y, {"w": w}, scale=0.5)["extra"]
    after = torch.rand(3, device=device)
    y.square().sum().backward()
    found = [x.grad] if leaf else []
    return [
        t.detach().cpu() for t in (*found, w.grad, y, after, *(p.grad for p in layers.parameters()))
    ]


@pytest.mark.parametrize(("device", "leaf"), [("cpu", True), ("jax", False)])
def test_checkpointed_modules_have_the_same_gradients(device, leaf):
    want = gradients("cpu", lambda module: module, leaf=leaf)
    got = gradients(device, checkpoint_module, leaf=leaf)
    number = 3 if leaf else 2  # random numbers of another generator
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        if at != number or device == "cpu":
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="takes a module, and got a function"):
        checkpoint_module(lambda x: x)  # pyright: ignore[reportArgumentType]


def test_dropout_is_repeated_with_the_same_numbers():
    class Noise(nn.Module):  # without tensor arguments
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self) -> torch.Tensor:
            return nn.functional.dropout(self.weight * 1, 0.5).square()

    noise = checkpoint_module(Noise()).to("jax")
    y = noise()
    y.sum().backward()
    # y is 4 or 0, and so is the gradient's 2 * 2 * 2 where it is 4.
    assert torch.equal(noise.weight.grad.cpu(), y.detach().cpu() * 2)


def recorded() -> list[str]:
    program = tapes.recorder().program
    return [tapes.RECIPES[entry[0]].name for entry in program if isinstance(entry[0], int)]


def test_the_layer_runs_again_behind_a_barrier_that_waits_for_the_gradient():
    xs.sync()
    layer = checkpoint_module(Layer().to("jax"))
    x = data(4, 6).to("jax").requires_grad_()
    out = layer(x)["out"]
    assert recorded().count("aten::gelu") == 1 and "optimization_barrier" not in recorded()
    out.backward(torch.full((4, 6), 2.0).to("jax"))
    names = recorded()
    assert names.count("aten::gelu") == 2 and names.count("optimization_barrier") == 1
    barrier = names.index("optimization_barrier")
    program = [entry for entry in tapes.recorder().program if isinstance(entry[0], int)]
    assert len(program[barrier]) == 1 + 2 + 4, "input, gradient and parameters pass it together"


def test_two_backward_passes_and_nested_checkpoints():
    want = checkpoint_module(nn.Sequential(Plain(), Plain()))
    got = copy.deepcopy(want)
    for layer in (*got, got):
        assert checkpoint_module(checkpoint_module(layer)) is layer
    x = data(4, 6)
    for module, value in ((want, x), (got.to("jax"), x.to("jax"))):
        y = module(value)
        y.sum().backward(retain_graph=True)
        (y * 2).sum().backward()
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def test_a_copy_uses_its_own_parameters_and_without_gradients_it_runs_as_before():
    first = checkpoint_module(Plain())
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.linear.weight.zero_()
        second.linear.bias.zero_()
    assert not second(data(2, 6)).any() and first(data(2, 6)).any()
    want = first(data(2, 6)).detach()
    with torch.no_grad():
        y = first.to("jax")(data(2, 6).to("jax"))
    assert not y.requires_grad and y.grad_fn is None
    torch.testing.assert_close(y.cpu(), want)


# --- The rest -------------------------------------------------------------------------------------


def test_the_first_fsdp_is_refused_with_advice():
    with pytest.raises(RuntimeError, match=r"one process for all.*SpmdFullyShardedDataParallel"):
        fsdp.XlaFullyShardedDataParallel(nn.Linear(2, 2))
    assert not isinstance(nn.Linear(2, 2), fsdp.XlaFullyShardedDataParallel)
    for name in ("consolidate_sharded_state_dicts", "consolidate_sharded_model_checkpoints"):
        with pytest.raises(RuntimeError, match=rf"{name} puts together .*with torch_xla"):
            getattr(fsdp, name)("prefix", "suffix")


def test_linear_layers_are_patched_also_where_they_are_checkpointed():
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input * 2

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), checkpoint_module(nn.Linear(4, 6)), Own(6, 6))
    twin = copy.deepcopy(module)
    assert utils.apply_xla_patch_to_nn_linear(module) is module
    assert module[0].forward.__func__ is not nn.Linear.forward
    assert module[1]._xla_checkpointed_forward_original.__func__ is not nn.Linear.forward
    assert module[2].forward.__func__ is Own.forward
    results = []
    for each, x in ((module.to("jax"), data(2, 3, 6).to("jax")), (twin, data(2, 3, 6))):
        y = each(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in each.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-4)
    marked = utils.apply_xla_patch_to_nn_linear(nn.Linear(2, 2), lambda m, x: x + 1)
    assert marked(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_collectives_that_do_nothing():
    x = data(3, 2).to("jax")
    gathered = utils.dummy_all_gather(x, dim=1)
    assert torch.equal(gathered.cpu(), x.cpu()) and gathered is not x
    assert torch.equal(utils.dummy_all_reduce("sum", x, 2.0).cpu(), x.cpu() * 2)
    pair = [torch.ones(2), torch.ones(3)]
    assert utils.dummy_all_reduce("sum", pair, 3.0) == pair and pair[1].tolist() == [3.0] * 3
    got: list[torch.Tensor] = []
    scatter = utils.DummyReduceScatter(1)
    scatter(x, got.append)
    scatter.flush()
    assert got == [x]
    with pytest.raises(ValueError, match="shard_count is 1, not 8"):
        utils.DummyReduceScatter(8)


def test_buckets_are_handed_on_when_they_are_full():
    got: list[float] = []
    bucket = utils.BucketizedReduceScatter(2 * 4 / 2**20, 1, None, True)
    bucket.scale = 0.5
    for number in (2.0, 4.0, 6.0, 8.0):
        bucket(torch.tensor(number), lambda t: got.append(t.item()))
    assert got == [1.0, 2.0, 3.0], "the third made it more than two elements"
    bucket.flush()
    bucket.flush()
    assert got == [1.0, 2.0, 3.0, 4.0]
    at_once = utils.BucketizedReduceScatter(0, 1, None, True)
    at_once(torch.tensor(5.0), lambda t: got.append(t.item()))
    assert got[-1] == 5.0
    with pytest.raises(ValueError, match="shard_count is 1, not 2"):
        utils.BucketizedReduceScatter(0, 2, None, True)
