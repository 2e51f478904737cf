"""Libraries in JAX: their states on a mesh give what they give on one device, without isoshard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import isoshard as iso
from isoshard import P
from tests.ecosystem.case import ON_A_MESH, Numbers, case, data, two_by_four

WHOLE = "iso.shard(state, mesh, plan)"


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Normal numbers, the same in every run."""
    return jnp.asarray(data(*shape, seed=seed).numpy())


def on_mesh(tree: Any, device: str, plan: Any = None) -> Any:
    """A state over the mesh, by `Plan.fsdp` where no plan is given; as it is for the CPU."""
    if device == "cpu":
        return tree
    return iso.shard(tree, two_by_four(), plan or iso.Plan.fsdp("model", min_bytes=128))


def rows(value: jax.Array, device: str) -> jax.Array:
    """A batch whose rows are split over the mesh; as it is for the CPU."""
    return on_mesh(value, device, P("data"))


def halves(*arrays: jax.Array) -> None:
    """Raise if one lies whole on each device of its mesh."""
    for one in arrays:
        if len(one.devices()) > 1 and one.sharding.is_fully_replicated:
            raise AssertionError(f"{one.sharding} splits nothing")


@case("flax", "Linen: a TrainState, its step included", WHOLE, again=True)
def _train_state(device: str) -> Numbers:
    from flax import linen
    from flax.training.train_state import TrainState

    model = linen.Sequential([linen.Dense(32), jnp.tanh, linen.Dense(8)])
    x = array(16, 8)
    params = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    state, x = on_mesh(state, device), rows(x, device)
    halves(state.params["params"]["layers_0"]["kernel"])

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for _ in range(3):
        state, loss = step(state, x)
        losses.append(loss)
    return [*losses, *jax.tree.leaves(state)]


@case("flax", "NNX: BatchNorm, optax.MultiSteps", ON_A_MESH, again=True)
def _nnx(device: str) -> Numbers:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jnp.tanh(self.norm(self.up(x))))

    net, x = on_mesh(Net(nnx.Rngs(0)), device), rows(array(16, 8), device)
    halves(net.up.kernel[...])
    optimizer = nnx.Optimizer(net, optax.MultiSteps(optax.sgd(0.1), 2), wrt=nnx.Param)

    @nnx.jit
    def step(net: Net, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda n: (n(x) ** 2).mean())(net)
        optimizer.update(net, gradients)
        return loss

    losses = [step(net, optimizer, x) for _ in range(4)]
    return [*losses, *jax.tree.leaves(nnx.state(net))]


@case("chex", "a dataclass with an int", WHOLE)
def _chex(device: str) -> Numbers:
    import chex

    @chex.dataclass
    class State:
        weight: jax.Array
        step: int

    state = on_mesh(State(weight=array(16, 8), step=3), device)
    halves(state.weight)
    state = jax.jit(lambda s: s.replace(weight=s.weight @ s.weight.T, step=s.step + 1))(state)
    return [state.weight, state.step]


@case("equinox", "optax.multi_transform, serialised leaves", ON_A_MESH, again=True)
def _equinox(device: str) -> Numbers:
    import equinox as eqx

    model = on_mesh(eqx.nn.MLP(8, 8, 32, 1, key=jax.random.key(0)), device)
    halves(model.layers[0].weight)
    x = rows(array(16, 8), device)
    label = lambda tree: jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", tree)  # noqa: E731
    tx = optax.multi_transform({"kernel": optax.adam(1e-2), "bias": optax.sgd(1e-2)}, label)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, x: jax.Array) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        updates, state = tx.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(3):
        model, state, loss = step(model, state, x)
        losses.append(loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.eqx"
        eqx.tree_serialise_leaves(path, model)
        model = eqx.tree_deserialise_leaves(path, model)
    return [*losses, *jax.tree.leaves(eqx.filter(model, eqx.is_array))]


@case("orbax-checkpoint", "saves and restores sharded arrays", "", rtol=0, again=True)
def _orbax(device: str) -> Numbers:
    import orbax.checkpoint as ocp

    tree = on_mesh({"kernel": array(16, 8), "bias": array(8, seed=1)}, device)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", tree)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(Path(folder) / "state", tree)
    if [one.sharding for one in again.values()] != [one.sharding for one in tree.values()]:
        raise AssertionError("the layout was not kept")
    return list(again.values())


@case("safetensors", "safetensors.flax: arrays on a mesh", "", rtol=0, again=True)
def _safetensors_flax(device: str) -> Numbers:
    from safetensors.flax import load_file, save_file

    tree = on_mesh({"kernel": array(16, 8), "bias": array(8, seed=1)}, device)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tree, Path(folder) / "state.safetensors")
        again = load_file(Path(folder) / "state.safetensors")
    return [again["kernel"], again["bias"]]


@case("dm-haiku", "an MLP: a gradient", "iso.shard(params, mesh, plan)", again=True)
def _haiku(device: str) -> Numbers:
    import haiku

    net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([32, 8])(x)))
    x = array(16, 8)
    params = on_mesh(net.init(jax.random.key(0), x), device)
    halves(params["mlp/~/linear_0"]["w"])
    gradient = jax.jit(jax.grad(lambda p, x: (net.apply(p, x) ** 2).mean()))
    return jax.tree.leaves(gradient(params, rows(x, device)))


@case(
    "diffrax",
    "an ODE whose field is a torch module, and its gradient",
    "iso.jax_function(module)",
    again=True,
)
def _diffrax(device: str) -> Numbers:
    import diffrax

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    start, step = data(4, seed=1), 0.25
    if device == "cpu":  # by hand
        y = start
        for _ in range(4):
            slope = module(y)
            y = y + step / 2 * (slope + module(y + step * slope))
        y.square().sum().backward()
        return [y.detach(), *(one.grad for _, one in sorted(module.named_parameters()))]
    field = iso.jax_function(module)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        term = diffrax.ODETerm(lambda t, y, p: field(p, y))
        y = jnp.asarray(start.numpy())
        how = {"adjoint": diffrax.DirectAdjoint(), "max_steps": 4}
        found = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, step, y, params, **how).ys[0]
        return (found**2).sum(), found

    gradient, found = jax.jit(jax.grad(loss, has_aux=True))(field.params)
    return [found, *(gradient[name] for name in sorted(gradient))]


@case("jaxopt", "LBFGS", "iso.shard(params, mesh, plan)", rtol=1e-3, again=True)
def _jaxopt(device: str) -> Numbers:
    import jaxopt

    x, y = data(16, 8).numpy(), data(16, 8, seed=1).numpy()
    if device == "cpu":  # where the gradient is zero
        best = np.linalg.solve(x.T @ x / 64 + 0.2 * np.eye(8, dtype=np.float32), x.T @ y / 64)
        return [torch.from_numpy(best), ((x @ best - y) ** 2).mean() + 0.1 * (best**2).sum()]
    x, y = (rows(jnp.asarray(one), device) for one in (x, y))
    params = on_mesh({"weight": jnp.zeros((8, 8))}, device)

    def loss(p: Any) -> jax.Array:
        return ((x @ p["weight"] - y) ** 2).mean() + 0.1 * (p["weight"] ** 2).sum()

    solver = jaxopt.LBFGS(loss, maxiter=50, tol=1e-6, history_size=3, linesearch="backtracking")
    found, state = solver.run(params)
    return [found["weight"], state.value]


@case("numpyro", "SVI of a regression", 'iso.shard(x, mesh, P("data"))', again=True)
def _numpyro(device: str) -> Numbers:
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        normal = numpyro.distributions.Normal
        weight = numpyro.sample("weight", normal(jnp.zeros(8), 1.0).to_event(1))
        numpyro.sample("y", normal(x @ weight, 0.5).to_event(1), obs=y)

    x, y = rows(array(16, 8), device), rows(array(16, seed=1), device)
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    run = jax.jit(lambda x, y: svi.run(jax.random.key(0), 5, x, y, progress_bar=False))
    found = run(x, y)
    return [found.losses, *(found.params[name] for name in sorted(found.params))]


@case("grain", "batches of a MapDataset", "iso.data.loader(dataset, mesh, spec)", rtol=0)
def _grain(device: str) -> Numbers:
    import grain

    dataset = grain.MapDataset.source(np.arange(32.0, dtype=np.float32)).shuffle(seed=0)
    batches = dataset.map(lambda value: {"x": value}).batch(8).to_iter_dataset()
    if device == "jax":
        batches = iso.data.loader(batches, two_by_four(), P("data"))
    return [jnp.asarray(batch["x"]) for batch in batches]


@case("jaxtyping", "shapes of tensors and of arrays on a mesh", "")
def _jaxtyping(device: str) -> Numbers:
    from jaxtyping import Float, jaxtyped

    tensor, value = data(4, 3).to(device), on_mesh(array(4, 8), device)
    with jaxtyped("context"):
        fits = isinstance(tensor, Float[torch.Tensor, "rows 3"])
        fits &= isinstance(value, Float[jax.Array, "rows columns"])
        does_not = isinstance(tensor, Float[torch.Tensor, "rows columns"])
    return [fits, does_not]
