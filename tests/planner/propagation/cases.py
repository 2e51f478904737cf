"""Models with Adam in plain JAX, and plans for them: what estimates are compared on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep


def adam(loss, params, moments, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second
    )
    return params, (first, second), value


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def free(x, name):
    """Activations are laid out as they come."""
    return x


def attention(x, layer, heads, between):
    _, s, d = x.shape
    q, k, v = (
        between(jnp.einsum("bsd,dhk->bshk", x, layer[name]), "heads") for name in ("q", "k", "v")
    )
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * (d // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, layer["o"])


def block(x, layer, heads, between=free):
    x = between(x + attention(norm(x, layer["n1"]), layer, heads, between), "stream")
    h = jax.nn.silu(norm(x, layer["n2"]) @ layer["gate"]) * (norm(x, layer["n2"]) @ layer["up"])
    return between(x + between(h, "hidden") @ layer["down"], "stream")


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


def mlp_loss(params, x, y):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean((x - y) ** 2)


def unrolled_loss(params, ids, labels, between=free):
    x = between(params["embed"][ids], "stream")
    for layer in params["layers"]:
        x = block(x, layer, 8, between)
    return cross_entropy(norm(x, params["norm"]) @ params["head"], labels)


def scanned_loss(params, ids, labels, between=free, remat=False):
    run = lambda x, layer: (block(x, layer, 8, between), None)  # noqa: E731
    if remat:
        run = jax.checkpoint(run, prevent_cse=False)
    x, _ = jax.lax.scan(run, between(params["embed"][ids], "stream"), params["layers"])
    return cross_entropy(norm(x, params["norm"]) @ params["head"], labels)


def rematted_loss(params, ids, labels, between=free):
    return scanned_loss(params, ids, labels, between, remat=True)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def integers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def mlp(layers=3, width=256, batch=1024):
    params = [(shape(width, 4 * width), shape(4 * width, width))] * layers
    return mlp_loss, params, (shape(batch, width), shape(batch, width))


def transformer(loss, stacked, layers=4, width=256, vocabulary=1024, batch=16, tokens=128):
    lead = (layers,) if stacked else ()
    head = width // 8
    layer = {
        **{name: shape(*lead, width, 8, head) for name in ("q", "k", "v")},
        "o": shape(*lead, 8, head, width),
        "gate": shape(*lead, width, 3 * width),
        "up": shape(*lead, width, 3 * width),
        "down": shape(*lead, 3 * width, width),
        "n1": shape(*lead, width),
        "n2": shape(*lead, width),
    }
    params = {
        "embed": shape(vocabulary, width),
        "layers": layer if stacked else [layer] * layers,
        "norm": shape(width),
        "head": shape(width, vocabulary),
    }
    return loss, params, (integers(batch, tokens), integers(batch, tokens))


TENSOR = {
    "q": ("d", "m", None), "k": ("d", "m", None), "v": ("d", "m", None), "o": ("m", None, "d"),
    "gate": ("d", "m"), "up": ("d", "m"), "down": ("m", "d"), "embed": ("m", "d"),
    "head": ("d", "m"), "0": ("d", "m"), "1": ("m", "d"), "tables": ("m", "d"),
}  # fmt: skip
"""By name, where the tensor axis ("m") and the FSDP axis ("d") go."""


def specs(params, letters):
    """A spec for each parameter; `letters` says which mesh axis "d" and "m" are, or None."""

    def spec_of(path, leaf):
        names = [str(getattr(p, "key", getattr(p, "idx", ""))) for p in path]
        entry = TENSOR.get("tables" if "tables" in names else names[-1])
        if entry is None or "top" in names or "convs" in names:
            return P()
        lead = len(leaf.shape) - len(entry)
        return P(*(None,) * lead, *(letters.get(letter) for letter in entry))

    return jax.tree_util.tree_map_with_path(spec_of, params)


PLANS = {
    "data": ((8,), ("data",), {}, ("data",)),
    "fsdp": ((8,), ("data",), {"d": "data"}, ("data",)),
    "tensor": ((8,), ("model",), {"m": "model"}, ()),
    "fsdp x tensor": ((4, 2), ("data", "model"), {"d": "data", "m": "model"}, ("data",)),
    "sequence": ((4, 2), ("data", "model"), {"d": "data", "m": "model"}, ("data", "model")),
}
"""Of each the mesh, its axes, which letter of `TENSOR` is which axis, and the rows of a batch."""


@dataclasses.dataclass
class Case:
    traced: TracedStep
    step: Callable[..., Any]
    structs: list[Any]
    donated: tuple[int, ...]

    def compiled(self):
        """The program of the host's partitioner."""
        return (
            jax.jit(
                self.step,
                donate_argnums=self.donated,
                out_shardings=[result.sharding for result in self.traced.results],
            )
            .lower(*self.structs)
            .compile()
        )


def case(model, plan):
    """A training step of a model under a plan."""
    loss, params, batch = model
    title = loss.__name__
    sizes, names, letters, rows = PLANS[plan]
    mesh = make_mesh(sizes, names, axis_types=AxisType.Auto)
    if "layers" in params:
        activations = {"stream": P(*rows, *(None,) * (3 - len(rows)))}
        if plan == "sequence":
            activations["heads"] = P("data", None, "model", None)
            activations["hidden"] = P("data", None, "model")

        def between(x, name):
            spec = activations.get(name)
            if spec is None:
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        loss = functools.partial(loss, between=between)
    layout = specs(params, letters)
    args = (params, (params, params), batch)
    of_batch = jax.tree.map(lambda x: P(*rows[:1]), batch)
    spec = (layout, (layout, layout), of_batch)
    leaves, structure = jax.tree.flatten(args)
    shardings = [
        NamedSharding(mesh, entry)
        for entry in jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, P))
    ]

    def step(*flat):
        params, moments, batch = jax.tree.unflatten(structure, flat)
        return jax.tree.leaves(adam(loss, params, moments, batch))

    count = len(jax.tree.leaves(params))
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(args)]
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        for x, s in zip(leaves, shardings, strict=True)
    ]
    roles = ["parameter"] * count + ["optimizer"] * 2 * count + ["input"] * len(batch)
    inputs = tuple(
        StepInput(name, role, x.shape, x.dtype, x.sharding)
        for name, role, x in zip(names, roles, structs, strict=True)
    )
    results = tuple(
        StepResult(names[n], n, shardings[n]) if n < 3 * count else StepResult("loss")
        for n in range(3 * count + 1)
    )
    traced = TracedStep(
        f"{title} {plan}", "jax", jax.make_jaxpr(step)(*structs), inputs, results, mesh
    )
    return Case(traced, step, structs, tuple(range(3 * count)))
