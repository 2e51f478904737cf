"""Parameters come and go: state dictionaries, files, copies, ties, parametrizations, pruning."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from tests.torch_bridge.on_both import on_both, same
from tests.torch_bridge.training.test_training import close, draw

functional = torch.nn.functional


class Tied(torch.nn.Module):
    """An embedding whose table is also the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def saved(thing: Any, **options: Any) -> Any:
    """What `torch.load` gives back."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


# --- State dictionaries --------------------------------------------------------------------------


def test_loading_into_a_sharded_module_keeps_its_layout_and_identity(mesh):
    plan = Plan({"*table.weight": P("x", "y"), "*": P()})
    source = tied()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    for state in (source.state_dict(), copy.deepcopy(source).to("jax").state_dict()):
        model = iso.shard(tied(), mesh, plan)
        before = {name: id(p) for name, p in model.named_parameters()}
        result = model.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        xs.sync()
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert model.table.weight is model.head.weight
        assert model.table.weight.partition_spec == P("x", "y")
        same(dict(model.state_dict()), dict(source.state_dict()))


def test_loading_by_assignment_takes_the_tensors_themselves(mesh):
    model, state = tied().to("jax"), tied().to("jax").state_dict()
    state["table.weight"] = state["head.weight"] = iso.shard(draw(8, 16), mesh, P("x", None))
    model.load_state_dict(state, assign=True)
    assert model.table.weight.partition_spec == P("x") and model.table.weight.requires_grad
    assert isinstance(model.table.weight, torch.nn.Parameter)
    close(model.head.weight, draw(8, 16))
    blank = torch.nn.Linear(4, 3, device="meta")
    blank.load_state_dict(torch.nn.Linear(4, 3).to("jax").state_dict(), assign=True)
    assert blank.weight.device.type == "jax" and blank(torch.ones(4, device="jax")).shape == (3,)


def test_what_does_not_fit_is_refused_as_torch_does():
    model = torch.nn.Linear(4, 3).to("jax")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"bias\""):
        model.load_state_dict({"weight": torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        model.load_state_dict({"weight": torch.zeros(5, 4), "bias": torch.zeros(3)})
    assert model.weight.count_nonzero() == model.bias.count_nonzero() == 0  # what fits is taken
    result = model.load_state_dict({"weight": torch.zeros(3, 4), "other": 1}, strict=False)
    assert result.missing_keys == ["bias"] and result.unexpected_keys == ["other"]
    assert model.weight.count_nonzero().item() == 0


def test_hooks_of_state_dictionaries():
    model = tied().to("jax")
    model._register_load_state_dict_pre_hook(
        lambda state, prefix, *rest: state.update({f"{prefix}norm.bias": torch.ones(16)})
    )
    model.register_state_dict_post_hook(lambda m, state, *rest: state.__delitem__("head.weight"))
    model.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())
    state = model.state_dict()
    assert "head.weight" not in state
    model.load_state_dict(state)
    assert model.norm.bias.tolist() == [1] * 16


def test_a_state_dictionary_shares_memory_with_its_module():
    model = torch.nn.Linear(4, 3).to("jax")
    model.state_dict()["weight"].zero_()
    assert model.weight.count_nonzero().item() == 0
    kept = model.state_dict(keep_vars=True)["weight"]
    assert kept is model.weight


# --- Files ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_with_weights_only():
    model = tied().to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8).to("jax")).sum().backward()
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    for place, device in ((None, "jax"), ("cpu", "cpu"), ("jax", "jax"), ({"jax:0": "cpu"}, "cpu")):
        loaded = saved(checkpoint, map_location=place, weights_only=True)
        weight = loaded["model"]["table.weight"]
        assert weight.device.type == device
        torch.testing.assert_close(weight.cpu(), model.table.weight.detach().cpu())
        moment = loaded["optimizer"]["state"][0]["exp_avg"]
        assert moment.device.type == device
        fresh = tied().to(device)
        fresh.load_state_dict(loaded["model"])
        other = torch.optim.AdamW(fresh.parameters())
        other.load_state_dict(loaded["optimizer"])
        assert torch.equal(
            other.state[fresh.table.weight]["exp_avg"].cpu(),
            optimizer.state[model.table.weight]["exp_avg"].cpu(),
        )


def test_tied_weights_are_written_once():
    file, single = io.BytesIO(), io.BytesIO()
    module = torch.nn.Linear(256, 256, bias=False).to("jax")
    torch.save({"a": module.weight.detach()}, single)
    torch.save({"a": module.weight.detach(), "b": module.weight.detach()}, file)
    assert file.tell() < 1.2 * single.tell()


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]


def test_every_dtype_is_saved():
    for dtype in [*DTYPES, torch.float8_e4m3fn]:
        data = torch.arange(6).reshape(2, 3).to(dtype)
        for thing in (data, data[0, 0], data[:0], data.t()):
            loaded = saved(thing.to("jax"), weights_only=True)
            assert isinstance(loaded, xs.XLAShardedTensor) and loaded.dtype == dtype
            assert torch.equal(raw(loaded.cpu()), raw(thing)) and loaded.shape == thing.shape


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("place", [torch.device("jax"), {"cpu": "jax:0"}], ids=str)
def test_a_checkpoint_of_the_cpu_is_loaded_to_the_device(place):
    model = tied()
    for loaded in (
        saved(model.state_dict(), map_location=place),
        saved(model, map_location=place, weights_only=False).state_dict(),
        saved(dict(model.named_parameters()), map_location=place),
    ):
        assert all(isinstance(tensor, xs.XLAShardedTensor) for tensor in loaded.values())
        want = model.state_dict()
        for name, tensor in loaded.items():
            close(tensor, want[name])
    several = {"whole": torch.arange(6.0), "bytes": torch.arange(3, dtype=torch.uint8)}
    several |= {"turned": several["whole"].view(2, 3).t(), "part": several["whole"][2:4]}
    loaded = saved(several, map_location=place)
    same(loaded, several)
    assert loaded["turned"].stride() == (1, 3)
    again = saved({"a": several["whole"], "b": several["whole"]}, map_location=place)
    again["a"].zero_()
    assert again["b"].count_nonzero().item() == 0


def test_memory_of_torch_is_refused_elsewhere():
    with pytest.raises(RuntimeError, match=r"cannot take a torch storage.*\.to\('jax'\)"):
        torch.zeros(2, device="jax").set_(torch.ones(2).untyped_storage(), 0, (2,), (1,))


def test_whole_modules_and_optimizers_are_pickled_and_copied():
    model = tied().to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    x = torch.arange(8).to("jax")
    model(x).square().sum().backward()
    optimizer.step()
    for twin, other in (
        pickle.loads(pickle.dumps((model, optimizer))),
        copy.deepcopy((model, optimizer)),
        saved((model, optimizer), weights_only=False),
    ):
        assert twin.table.weight is twin.head.weight
        assert other.param_groups[0]["params"][0] is twin.table.weight
        assert isinstance(twin.table.weight, torch.nn.Parameter)
        close(twin.table.weight, model.table.weight.detach().cpu())
        with torch.no_grad():
            twin.table.weight.zero_()
        assert model.table.weight.count_nonzero().item() > 0
        assert other.state[twin.table.weight]["exp_avg"].device.type == "jax"


# --- Ties ----------------------------------------------------------------------------------------


def test_tied_weights_stay_tied_and_train_as_on_the_cpu(mesh):
    def train(model: Tied, x: torch.Tensor) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert model.table.weight is model.head.weight
        return list(model.parameters())

    x = torch.arange(8)
    want = train(tied(), x)
    same(train(tied().to("jax"), x.to("jax")), want)
    plan = Plan({"*weight": P(), "*": P()})
    same(train(iso.shard(tied(), mesh, plan), iso.shard(x, mesh, P("x"))), want)
    same(train(copy.deepcopy(tied().to("jax")), x.to("jax")), want)
    assert len(list(tied().to("jax").parameters())) == len(list(tied().parameters()))


# --- Parametrizations, norms and pruning ---------------------------------------------------------


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def reparametrized(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    if kind == "weight_norm":
        return parametrizations.weight_norm(layer)
    if kind == "spectral_norm":
        return parametrizations.spectral_norm(layer)
    if kind.startswith("orthogonal"):
        return parametrizations.orthogonal(layer, orthogonal_map=kind.split()[1])
    if kind == "symmetric":
        return parametrize.register_parametrization(layer, "weight", Symmetric())
    if kind == "pruned":
        prune.l1_unstructured(layer, "weight", amount=0.5)
        prune.ln_structured(layer, "weight", amount=1, n=2, dim=0)
    return layer


@pytest.mark.parametrize(
    "kind", ["weight_norm", "spectral_norm", "orthogonal cayley", "symmetric", "pruned"]
)
def test_a_parametrized_layer_trains_as_on_the_cpu(kind):
    def program(x: torch.Tensor) -> Any:
        layer = reparametrized(kind).to(x.device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(x).square().sum().backward()
        optimizer.step()
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        if kind == "pruned":
            prune.remove(layer, "weight")
        elif kind != "symmetric":
            parametrize.remove_parametrizations(layer, "weight")
        return state, layer.weight.detach(), layer(x)

    on_both(program, rtol=1e-3, atol=1e-4)


def test_a_parametrization_is_made_on_the_device():
    torch.manual_seed(0)
    weight = torch.nn.Linear(4, 4).state_dict()
    found = {}
    for device in ("cpu", "jax"):
        layers = {name: torch.nn.Linear(4, 4).to(device) for name in "nsop"}
        for layer in layers.values():
            layer.load_state_dict(weight)
        parametrizations.weight_norm(layers["n"])
        parametrizations.spectral_norm(layers["s"], n_power_iterations=4)
        layer = torch.nn.Linear(4, 4).to(device)
        parametrizations.orthogonal(layer, orthogonal_map="householder")
        assert torch.dist(layer.weight.mT @ layer.weight, torch.eye(4, device=device)) < 1e-4
        parametrize.register_parametrization(layers["o"], "weight", Symmetric())
        prune.l1_unstructured(layers["p"], "weight", amount=0.5)
        found[device] = [layer.weight.detach() for layer in layers.values()]
    same(found["jax"], found["cpu"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_resumed_loop_compiles_nothing(mesh, counted, compiled, fresh):
    def run(device, places=lambda x, spec: x):
        def started(seed):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
            model = places(model, Plan({"0.weight": P("x"), "1.weight": P(None, ("x", "y"))}))
            groups = [{"params": [*layer.parameters()]} for layer in model]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

            def step(x):
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            step = xs.compile(step) if compiled and device == "jax" else step
            return model, optimizer, schedule, step

        model, optimizer, schedule, step = started(0)
        losses = []
        for n in range(5):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(n))
            losses.append(float(step(places(x, P("x")))))
            schedule.step()
            if n == 2:
                if device == "jax":
                    before = counted("compilations"), counted("captures")
                file = io.BytesIO()
                objects = [model, optimizer, schedule]
                torch.save([thing.state_dict() for thing in objects], file)
                for _ in range(2):
                    float(step(places(x, P("x"))))
                    schedule.step()
                if fresh:
                    model, optimizer, schedule, step = started(1)
                    objects = [model, optimizer, schedule]
                file.seek(0)
                for thing, state in zip(objects, torch.load(file), strict=True):
                    thing.load_state_dict(state)
        if device == "jax":
            extra = 1 if fresh and compiled else 0  # of the new step, which is another function
            assert (counted("compilations"), counted("captures")) == (before[0], before[1] + extra)
            assert optimizer.state[model[0].weight]["exp_avg"].partition_spec == P("x")
        return losses

    found = run("jax", lambda x, spec: iso.shard(x, mesh, spec))
    np.testing.assert_allclose(found, run("cpu"), rtol=1e-5)


def test_an_earlier_state_dict_keeps_its_elements():
    def run(device):
        weight = torch.nn.Parameter(torch.arange(4.0, device=device))
        optimizer = torch.optim.Adam([weight], lr=0.1)

        def stepped():
            weight.square().sum().backward()
            optimizer.step()
            state = optimizer.state_dict()
            return state, copy.deepcopy(state)

        first, frozen = stepped()
        other = copy.deepcopy(stepped()[0])
        followed = {key: slot.tolist() for key, slot in first["state"][0].items()}
        optimizer.load_state_dict(other)
        kept = {key: slot.tolist() for key, slot in first["state"][0].items()}
        optimizer.load_state_dict(frozen)
        now = {key: slot.tolist() for key, slot in optimizer.state[weight].items()}
        again, _ = stepped()
        return followed, kept, now, {k: v.tolist() for k, v in again["state"][0].items()}

    for found, expected in zip(run("jax"), run("cpu"), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-6)
