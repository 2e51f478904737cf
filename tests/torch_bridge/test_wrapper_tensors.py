"""Tensors made of other tensors: moved, sharded, compiled, saved, and in JAX, by one mechanism."""

import io

import jax
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from isoshard.torch_bridge.common.wrapper_tensors import expanded, is_wrapper, joined
from isoshard.torch_bridge.layout.inner_specs import inner_sharding, outer_sharding

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A weight of tensors `q` and `scale`; operators see what they dequantize to."""

    @staticmethod
    def __new__(cls, q, scale, shape, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=q.device)

    def __init__(self, q, scale, shape, dtype):
        self.q, self.scale = q, scale

    def __tensor_flatten__(self):
        return ["q", "scale"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["q"], inner["scale"], size, context["dtype"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            inner = [func(first.q), func(first.scale)]
            return cls(*inner, first.shape, first.dtype)
        if func is aten._to_copy.default:
            device = kwargs.get("device") or first.device
            inner = [first.q.to(device), first.scale.to(device)]
            return cls(*inner, first.shape, kwargs.get("dtype") or first.dtype)
        args, kwargs = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        return func(*args, **kwargs)


class Rows8(Wrapper):
    """Integers of 8 bits with a scale for each row."""

    @classmethod
    def quantize(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.shape, weight.dtype)

    def dequantize(self):
        return self.q.to(self.dtype) * self.scale


class Groups4(Wrapper):
    """Two integers of 4 bits in a byte, with a scale, itself quantized, for 8 columns."""

    @classmethod
    def quantize(cls, weight):
        groups = weight.unflatten(1, (-1, 8))
        scale = groups.abs().amax(2) / 7
        q = (groups / scale[..., None]).round().flatten(1).to(torch.int8).view(torch.uint8) & 15
        return cls(q[:, ::2] | (q[:, 1::2] << 4), Rows8.quantize(scale), *_kind(weight))

    def dequantize(self):
        q = torch.stack([self.q & 15, self.q >> 4], -1).flatten(1).to(torch.int8)
        q = torch.where(q > 7, q - 16, q).to(self.dtype).unflatten(1, (-1, 8))
        return (q * self.scale.dequantize()[..., None]).flatten(1)


def _kind(weight):
    return weight.shape, weight.dtype


KINDS = {"rows": Rows8, "groups": Groups4}
PLAN = Plan({"0.weight": P("model", "data"), "2.weight": P(None, "model"), "*": None})
X = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 32))).float()


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def network(kind, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    ).requires_grad_(False)
    for layer in (model[0], model[2]):
        quantized = kind.quantize(layer.weight.data)
        layer.weight = torch.nn.Parameter(quantized, requires_grad=False)
    return model


def exact(model, x):
    """What the dequantized weights compute, in float64."""
    x = x.double() @ model[0].weight.dequantize().double().T + model[0].bias.double()
    return x.relu() @ model[2].weight.dequantize().double().T + model[2].bias.double()


def assert_near(got, want):
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_quantized_model_is_sharded_as_the_plan_says(kind, mesh):
    model = network(kind)
    want = exact(model, X)
    before = [id(p) for p in model.parameters()]
    assert iso.shard(model, mesh, PLAN) is model and [id(p) for p in model.parameters()] == before
    assert type(model[0].weight) is kind and not model[0].weight.requires_grad
    assert {name: at.spec for name, at in iso.sharding_of(model).items()} == {
        "0.weight": P("model", "data"),
        "0.bias": P(),
        "2.weight": P(None, "model"),
        "2.bias": P(),
    }
    arrays = iso.to_jax(model)
    specs = {name: array.sharding.spec for name, array in arrays.items()}
    inner = {"q": P("model", "data"), "scale": P("model")}
    if kind is Groups4:
        inner = {"q": inner["q"], "scale.q": P("model", "data"), "scale.scale": P("model")}
    assert {k: specs[f"0.weight.{k}"] for k in inner} == inner
    integers = arrays["0.weight.q"]
    assert integers.itemsize == 1 and integers.addressable_shards[0].data.size == integers.size // 8
    assert_near(model(X.to("jax")), want)
    step = xs.compile(lambda x: model(x))
    captures = iso.metrics.counters().get("captures", 0)
    for _ in range(3):
        assert_near(step(iso.shard(X, mesh, P("data"))), want)
    assert iso.metrics.counters()["captures"] == captures + 1
    marked = kind.quantize(torch.ones(64, 32)).to("jax")
    assert xs.mark_sharding(marked, mesh, ("model", None)) is marked
    assert iso.sharding_of(marked).spec == P("model")
    resharded = iso.reshard(model, P("data"))[2].weight
    assert iso.sharding_of(resharded).spec == P("data")
    assert iso.sharding_of(iso.full(resharded)).spec == P()
    assert_near(model(X.to("jax")), want)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_quantized_after_sharding_it_keeps_the_layout(kind, mesh):
    torch.manual_seed(0)
    layer = iso.shard(torch.nn.Linear(32, 64), mesh, Plan({"weight": P("model"), "*": None}))
    layer.weight = torch.nn.Parameter(kind.quantize(layer.weight.detach()), requires_grad=False)
    assert iso.sharding_of(layer.weight).spec == P("model")
    want = X.double() @ layer.weight.dequantize().cpu().double().T + layer.bias.cpu().double()
    assert_near(layer(X.to("jax")).detach(), want.detach())


def test_moved_by_torch_and_pickled(mesh):
    model = network(Groups4).to("jax")
    iso.shard(model, mesh, PLAN)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded = loaded["0.weight"].cpu().dequantize()
    assert torch.equal(loaded, network(Groups4)[0].weight.dequantize())


def test_arguments_and_results_of_compiled_steps(mesh):
    step = xs.compile(lambda weight, x: (torch.nn.functional.linear(x, weight), weight))
    quantize = xs.compile(lambda weights: {"weight": Groups4.quantize(weights[0])})
    for seed in range(3):
        torch.manual_seed(seed)
        weight = torch.randn(64, 32)
        rows = iso.shard(Rows8.quantize(weight), mesh, P("model"))
        for wrapper in (rows, quantize([weight.to("jax")])["weight"]):
            got, same = step(wrapper, X.to("jax"))
            assert type(same) is type(wrapper) and same.q is wrapper.q
            assert_near(got, X.double() @ wrapper.dequantize().cpu().double().T)
    assert len(step.replays) == 2 and len(quantize.replays) == 1


def test_saved_and_restored_also_by_another_plan(tmp_path, mesh):
    saved = iso.shard(network(Groups4), mesh, PLAN)
    iso.save(tmp_path, {"model": saved, "weight": saved[0].weight, "step": 3})
    want = exact(network(Groups4), X)

    def like():
        return {"model": network(Groups4, 1), "weight": network(Groups4, 1)[0].weight, "step": 0}

    restored = iso.restore(tmp_path, like())
    assert restored["step"] == 3 and is_wrapper(restored["weight"])
    assert_near(restored["model"](X), want)
    rows = Plan({"0.weight": P("data", "model"), "weight": P("data"), "*": None})
    moved = iso.restore(tmp_path, like(), mesh=mesh, plan=rows)
    specs = {name: at.spec for name, at in iso.sharding_of(moved["model"]).items()}
    assert specs["0.weight"] == P("data", "model") and specs["2.weight"] == P()
    assert iso.sharding_of(moved["weight"]).spec == P("data")
    assert_near(moved["model"](X.to("jax")), want)
    step = xs.compile(lambda x: saved(x))
    step(X.to("jax"))
    saved[0].weight.q.zero_()
    iso.restore(tmp_path, {"model": saved}, partial=True)  # writes where the layout is the same
    assert_near(step(X.to("jax")), want)
    assert len(step.replays) == 1


def test_a_state_of_an_optimizer(tmp_path, mesh):
    weight = torch.nn.Parameter(iso.shard(torch.ones(64, 32), mesh, P("model")))

    def optimizer(value):
        sgd = torch.optim.SGD([("w", weight)], lr=0.1, momentum=0.9)
        moment = Rows8.quantize(torch.full((64, 32), value))
        sgd.state[weight]["momentum_buffer"] = iso.shard(moment, mesh, P("model"))
        return sgd

    iso.save(tmp_path, optimizer(3.0))
    restored = iso.restore(tmp_path, optimizer(1.0)).state[weight]["momentum_buffer"]
    assert iso.sharding_of(restored).spec == P("model")
    torch.testing.assert_close(restored.dequantize().cpu(), torch.full((64, 32), 3.0))


def test_in_jax_a_wrapper_is_its_arrays(mesh):
    model = network(Groups4)
    function = iso.jax_function(model)
    assert sorted(function.params)[:4] == ["0.bias", "0.weight.q"] + [
        f"0.weight.scale.{name}" for name in ("q", "scale")
    ]
    got = jax.jit(function)(function.params, X.numpy())
    assert_near(torch.from_numpy(np.array(got)), exact(model, X))
    arrays = iso.to_jax(iso.shard(Rows8.quantize(X), mesh, P("data")))
    assert {name: a.sharding.spec for name, a in arrays.items()} == {
        "q": P("data"),
        "scale": P("data"),
    }


def test_errors_name_the_wrapper_and_what_to_do(mesh):
    wrapper = Rows8.quantize(X)
    with pytest.raises(TypeError, match=r"Rows8, which is made of several tensors, q, scale"):
        iso.local_shards(iso.shard(wrapper, mesh, P("data")))
    with pytest.raises(iso.ShardingError, match=r"tensor is a Rows8.*blocks of given sizes"):
        iso.shard(wrapper, mesh, P("data"), uneven="pad", sizes=(5, 3))
    with pytest.raises(iso.ShardingError, match="weight"):
        iso.shard({"weight": wrapper}, mesh, {"weight": P("nothing")})
    with pytest.raises(KeyError, match=r"missing are \['0.weight.q'"):
        function = iso.jax_function(network(Rows8))
        function({k: v for k, v in function.params.items() if not k.endswith("q")}, X.numpy())


def test_what_is_no_wrapper(mesh):
    local = iso.shard(X, mesh, P("data"))
    nested = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    for tensor in (X, local, nested, torch.nn.Parameter(X), None):
        assert not is_wrapper(tensor)
    model = dict(network(Groups4).named_parameters())
    again = joined(model, expanded(model))
    assert torch.equal(again["0.weight"].dequantize(), model["0.weight"].dequantize())
    assert isinstance(again["0.weight"], torch.nn.Parameter)


@pytest.mark.parametrize(
    ("inner", "spec"),
    [
        ((), P()),
        ((8,), P("x")),
        ((32,), P("y")),
        ((8, 32), P("x", "y")),
        ((8, 16), P("x", "y")),
        ((8, 1), P("x")),
        ((1, 32), P(None, "y")),
        ((4, 2), P("x")),
        ((4, 8), P("y", "x")),
        ((7, 5), P()),
        ((4, 4, 2), P("x", "y")),
    ],
)
def test_the_spec_of_an_inner_tensor(inner, spec):
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, P("x", "y"))
    got = inner_sharding(sharding, (8, 32), inner)
    assert got.spec == spec
    if {*spec} >= {"x", "y"}:
        assert outer_sharding(got, (8, 32), inner).spec == P("x", "y")
    both = jax.sharding.NamedSharding(mesh, P(None, ("y", "x")))
    assert inner_sharding(both, (8, 32), (8, 4)).spec == P(None, "y")
