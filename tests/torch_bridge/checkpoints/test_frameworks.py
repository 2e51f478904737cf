"""One checkpoint for torch and Flax: names, layouts, dtypes, optimizers, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import CheckpointError, CopyError, ShardingError
from isoshard.core.weights import Kernel, Rule, WeightMap

MAP = WeightMap(
    [
        Rule("model.{i}.weight", "model.{i}.kernel", Kernel()),
        Rule("model.{i}.bias", "model.{i}.bias"),
    ]
)
TORCH_PLAN = iso.Plan({"0.weight": P("x", "y"), "2.weight": P("y", "x"), "*.bias": P("x")})
FLAX_PLAN = iso.Plan({"0.kernel": P("y", "x"), "2.kernel": P("x", "y"), "*.bias": P("x")})


class Flax(nnx.Module):
    """The twin of `make_torch`."""

    def __init__(self, rngs):
        setattr(self, "0", nnx.Linear(64, 128, rngs=rngs))
        setattr(self, "2", nnx.Linear(128, 32, rngs=rngs))


def make_torch():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32))


def bits(x):
    """The bytes of an array of either framework."""
    return np.asarray(iso.to_jax(x.detach() if isinstance(x, torch.Tensor) else x)).tobytes()


def same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if bits(a[name]) != bits(b[name])] == []


@pytest.fixture
def trained():
    """A torch module on (2, 4), trained by a step of AdamW, and its optimizer."""
    torch.manual_seed(0)
    model = iso.shard(make_torch(), iso.make_mesh((2, 4), ("x", "y")), TORCH_PLAN)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    inputs = torch.linspace(-1, 1, 8 * 64).reshape(8, 64).to(next(model.parameters()).device)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    if loss.device.type == "jax":
        xs.sync()
    return loss.item()


def test_from_torch_on_one_mesh_to_flax_on_another_and_on_one_device_and_back(trained, tmp_path):
    model, _ = trained
    # a NaN whose payload a conversion would lose
    with torch.no_grad():
        model[0].bias[3] = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)[0]
    iso.save(tmp_path / "torch", {"model": model, "step": 7})
    flax = nnx.eval_shape(lambda: Flax(nnx.Rngs(0)))
    other = iso.make_mesh((4, 2), ("x", "y"))
    like = {"model": flax, "step": 0}
    found = iso.restore(tmp_path / "torch", like, mesh=other, plan=FLAX_PLAN, weights=MAP)
    assert found["model"] is flax and found["step"] == 7
    kernel = getattr(flax, "0").kernel
    assert kernel.sharding == NamedSharding(other, P("y", "x"))
    assert bits(kernel[...]) == bits(model[0].weight.T)
    assert bits(getattr(flax, "2").bias[...]) == bits(model[2].bias)

    alone = Flax(nnx.Rngs(1))
    iso.restore(tmp_path / "torch", {"model": alone, "step": 0}, weights=MAP)
    assert len(getattr(alone, "2").kernel[...].devices()) == 1
    assert bits(getattr(alone, "2").kernel[...]) == bits(model[2].weight.T)

    for source in (flax, alone):
        iso.save(tmp_path / "flax", {"model": source, "step": 8})
        back = iso.shard(make_torch(), iso.make_mesh((2, 4), ("x", "y")), TORCH_PLAN)
        weight = back[0].weight
        like = {"model": back, "step": 0}
        found = iso.restore(tmp_path / "flax", like, weights=MAP.reversed)
        assert found["step"] == 8 and back[0].weight is weight
        assert weight.partition_spec == P("x", "y")
        same(dict(model.state_dict()), dict(back.state_dict()))


def test_a_module_and_its_optimizer_come_back_on_another_mesh(trained, tmp_path):
    model, optimizer = trained
    iso.save(tmp_path, {"model": model, "optimizer": optimizer})
    expected = step(model, optimizer)

    other, names = iso.make_mesh((4, 2), ("x", "y")), {}
    again = make_torch()
    names = {name: id(parameter) for name, parameter in again.named_parameters()}
    fresh = torch.optim.AdamW(again.named_parameters(), lr=1.0)  # has no state yet
    like = {"model": again, "optimizer": fresh}
    found = iso.restore(tmp_path, like, mesh=other, plan=TORCH_PLAN)
    assert found["model"] is again and found["optimizer"] is fresh
    assert {name: id(parameter) for name, parameter in again.named_parameters()} == names
    moment = fresh.state[again[0].weight]["exp_avg"]
    assert moment.named_sharding.spec == again[0].weight.named_sharding.spec
    assert moment.named_sharding.mesh.devices.shape == (4, 2)
    assert fresh.param_groups[0]["lr"] == 1e-2 and fresh.param_groups[0]["betas"] == (0.9, 0.999)
    assert step(again, fresh) == pytest.approx(expected, rel=1e-6)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.cpu(), dict(model.named_parameters())[name].cpu())


def test_a_module_on_the_cpu_and_on_meta(trained, tmp_path):
    model, optimizer = trained
    iso.save(tmp_path, {"model": model, "optimizer": optimizer})
    plain = make_torch()
    weight, pointer = plain[0].weight, plain[0].weight.data_ptr()
    iso.restore(tmp_path, {"model": plain}, partial=True)
    assert plain[0].weight is weight and weight.data_ptr() == pointer
    same(dict(model.state_dict()), dict(plain.state_dict()))
    with torch.device("meta"):
        abstract = make_torch()
    iso.restore(tmp_path, {"model": abstract}, partial=True)
    assert abstract[0].weight.device.type == "cpu" and abstract[0].weight.requires_grad
    same(dict(model.state_dict()), dict(abstract.state_dict()))
    with torch.device("meta"):
        abstract = make_torch()
    mesh = iso.make_mesh((4, 2), ("x", "y"))
    iso.restore(tmp_path, {"model": abstract}, mesh=mesh, plan=TORCH_PLAN, partial=True)
    assert abstract[0].weight.partition_spec == P("x", "y")
    same(dict(model.state_dict()), dict(abstract.state_dict()))
    iso.restore(
        tmp_path, {"model": plain, "optimizer": torch.optim.AdamW(plain.named_parameters())}
    )


def test_both_frameworks_in_one_tree(trained, tmp_path):
    model, optimizer = trained
    head = Flax(nnx.Rngs(params=0, dropout=1))
    tx = optax.adamw(1e-3)
    state = tx.init(nnx.state(head, nnx.Param))
    tree = {
        "encoder": model,
        "optimizer": optimizer,
        "head": head,
        "tx": state,
        "batch": torch.arange(6),
        "ids": np.arange(3, dtype=np.int64),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 4),
        "nested": [{"loss": 0.1, "name": "run"}, (1, True, None, b"ab", 2j)],
        "scalar": np.float64(0.3),
    }
    iso.save(tmp_path, tree)
    blank = {
        **tree,
        "encoder": make_torch(),
        "optimizer": None,
        "head": Flax(nnx.Rngs(params=3, dropout=4)),
        "tx": jax.tree.map(jnp.zeros_like, state),
        "batch": torch.zeros(6, dtype=torch.int64),
        "ids": np.zeros(3, dtype=np.int64),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 4),
        "nested": [{"loss": 0.0, "name": ""}, (0, False, None, b"", 0j)],
        "scalar": np.float64(0),
    }
    blank["optimizer"] = torch.optim.AdamW(blank["encoder"].named_parameters())
    found = iso.restore(tmp_path, blank)
    same(dict(model.state_dict()), dict(found["encoder"].state_dict()))
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: bits(a) == bits(b),
            nnx.state(head, nnx.Param),
            nnx.state(found["head"], nnx.Param),
        )
    )
    assert jax.tree.structure(found["tx"]) == jax.tree.structure(state)
    assert found["batch"].tolist() == [*range(6)] and found["batch"].dtype == torch.int64
    assert found["ids"].dtype == np.int64 and isinstance(found["ids"], np.ndarray)
    assert found["nested"] == tree["nested"] and found["scalar"] == tree["scalar"]
    assert type(found["scalar"]) is np.float64
    for name in ("key", "keys"):
        assert found[name].dtype == tree[name].dtype
        assert (jax.random.key_data(found[name]) == jax.random.key_data(tree[name])).all()


def test_logical_dtypes(tmp_path, mesh):
    ids = iso.shard(torch.arange(16), mesh, P("x"))
    assert ids.dtype == torch.int64 and iso.to_jax(ids).dtype == jnp.int32
    iso.save(tmp_path, {"ids": ids})
    assert iso.restore(tmp_path, {"ids": torch.zeros(16, dtype=torch.int64)})["ids"].tolist() == [
        *range(16)
    ]
    assert iso.restore(tmp_path, {"ids": np.zeros(16, np.int64)})["ids"].dtype == np.int64
    assert iso.restore(tmp_path, {"ids": jnp.zeros(16, jnp.int32)})["ids"].dtype == jnp.int32
    iso.save(tmp_path, {"ids": jnp.arange(16)})
    again = iso.restore(tmp_path, {"ids": torch.zeros(16, dtype=torch.int64).to("jax")})["ids"]
    assert again.dtype == torch.int64 and again.tolist() == [*range(16)]
    with pytest.raises(CheckpointError, match=r"ids: dtype int32 in the checkpoint, int16 in"):
        iso.restore(tmp_path, {"ids": np.zeros(16, np.int16)})


def test_values_that_do_not_fit_are_an_error(tmp_path):
    iso.save(tmp_path, {"large": torch.tensor([1 << 40]), "wide": torch.ones(2).double()})
    found = iso.restore(tmp_path, {"large": torch.tensor([0]), "wide": torch.zeros(2).double()})
    assert found["large"].item() == 1 << 40 and found["wide"].dtype == torch.float64
    with pytest.raises(CopyError, match=r"large: int64 is stored as int32 .* do not fit"):
        iso.restore(tmp_path, {"large": jnp.zeros(1, jnp.int32)}, partial=True)
    with pytest.raises(CheckpointError, match="wide: dtype float64 in the checkpoint, float32"):
        iso.restore(tmp_path, {"wide": jnp.zeros(2)}, partial=True)


def test_other_dtypes(tmp_path, mesh):
    tensors = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool):
        values = torch.randint(0, 2, (8, 8)).to(dtype)
        tensors[str(dtype)] = {"a": iso.shard(values, mesh, P("x", "y")), "b": values}
    iso.save(tmp_path, tensors)
    like = {name: {"a": two["b"], "b": two["a"]} for name, two in tensors.items()}
    restored = iso.restore(tmp_path, like)
    for name, found in restored.items():
        values = tensors[name]["b"]
        assert bits(found["a"]) == bits(found["b"]) == bits(values)
        assert found["a"].dtype == found["b"].dtype == values.dtype
        assert found["b"].partition_spec == P("x", "y") and found["a"].device.type == "cpu"


def test_names_that_only_the_target_tells(trained, tmp_path):
    model, optimizer = trained
    iso.save(tmp_path, {"model": model, "more": {"w": np.ones(3)}, "optimizer": optimizer})
    names = iso.weights.flax_names({"{i}": "{i}"})
    assert names.by_target
    flax = Flax(nnx.Rngs(1))
    mesh = iso.make_mesh((4, 2), ("x", "y"))
    like = {"model": flax, "more": {"w": np.zeros(3)}}
    options = {"mesh": mesh, "plan": iso.Plan([*FLAX_PLAN.rules], default=P()), "partial": True}
    with pytest.raises(ShardingError, match=r"more\.w: float64 would lose precision"):
        iso.restore(tmp_path, like, weights={"model": names}, **options)
    iso.save(tmp_path, {"model": model, "more": {"w": np.ones(3, np.float32)}})
    found = iso.restore(
        tmp_path,
        like | {"more": {"w": np.zeros(3, np.float32)}},
        weights={"model": names},
        **options,
    )
    assert found["more"]["w"].tolist() == [1, 1, 1]
    assert bits(getattr(flax, "0").kernel[...]) == bits(model[0].weight.T)


def test_tied_weights_stand_once(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tok = torch.nn.Embedding(64, 32)
            self.head = torch.nn.Linear(32, 64, bias=False)
            self.head.weight = self.tok.weight

    model = Tied()
    iso.save(tmp_path, model)
    assert len(list((tmp_path / "0" / "arrays").iterdir())) == 1
    other = Tied()
    iso.restore(tmp_path, other, mesh=iso.make_mesh((8,), ("x",)), plan=P("x"))
    assert other.head.weight is other.tok.weight
    assert bits(other.tok.weight) == bits(model.tok.weight)
    names = iso.restore(
        tmp_path, {"head": {"weight": np.zeros((64, 32), np.float32)}}, partial=True
    )
    assert names["head"]["weight"].tobytes() == bits(model.tok.weight)


def test_buffers_as_the_state_dict_has_them(tmp_path):
    class Counting(torch.nn.BatchNorm1d):
        def __init__(self):
            super().__init__(4)
            self.register_buffer("cache", torch.ones(4), persistent=False)

    model = Counting().to("jax")
    model(torch.randn(8, 4).to("jax"))
    iso.save(tmp_path, {"norm": model})
    other = Counting()
    iso.restore(tmp_path, {"norm": other})
    same(dict(model.state_dict()), dict(other.state_dict()))
    assert other.num_batches_tracked.dtype == torch.int64


def test_stacked_layers_are_those_of_the_list(tmp_path):
    from isoshard.torch_bridge.loops.stacked import StackedLayers

    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    iso.save(tmp_path, {"blocks": torch.nn.ModuleList(layers)})
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    for options in ({}, {"mesh": mesh, "plan": P("x")}):
        stacked = StackedLayers([torch.nn.Linear(8, 8) for _ in range(3)])
        iso.restore(tmp_path, {"blocks": stacked}, **options)
        for name, tensor in stacked.state_dict().items():
            number, kind = name.split(".")
            assert bits(tensor) == bits(getattr(layers[int(number)], kind))
    assert stacked.layers.weight.partition_spec == P(None, "x")
    with torch.device("meta"):
        abstract = StackedLayers([torch.nn.Linear(8, 8) for _ in range(3)])
    with pytest.raises(ShardingError, match='stacked layers on "meta"'):
        iso.restore(tmp_path, {"blocks": abstract}, mesh=mesh, plan=P("x"))


def test_a_tensor_is_a_value_and_parameters_stay_parameters(tmp_path, mesh):
    w = torch.nn.Parameter(torch.ones(8))
    iso.save(tmp_path, {"w": w})
    like = torch.nn.Parameter(torch.zeros(8))
    found = iso.restore(tmp_path, {"w": like})["w"]
    assert found is not like and like.sum() == 0 and found.sum() == 8
    assert isinstance(found, torch.nn.Parameter) and found.requires_grad
    found = iso.restore(tmp_path, {"w": like}, mesh=mesh, plan=P("x"))["w"]
    assert isinstance(found, torch.nn.Parameter) and found.partition_spec == P("x")


def test_meta_tensors_cannot_be_saved(tmp_path):
    with pytest.raises(ShardingError, match='on "meta" has no elements'):
        iso.save(tmp_path, {"w": torch.empty(3, device="meta")})


def test_a_step_that_is_captured_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2).to("jax")

    @xs.compile
    def step():
        iso.save(tmp_path, model)

    with pytest.raises(xs.CaptureError, match="a checkpoint in the middle of the step"):
        step()
