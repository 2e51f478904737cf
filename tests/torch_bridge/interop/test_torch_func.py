"""`torch.func` transforms functions of JAX as it does those of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

W, X = np.linspace(-1, 2, 6, dtype=np.float32).reshape(3, 2), np.ones((4, 3), np.float32).cumsum(0)


def of_jax(tree, x, power=2):
    found = jnp.sin(x @ tree["w"]) ** power
    return {"y": found, "place": jnp.argmax(x), "sum": (x * x).sum()}


def of_torch(tree, x, power=2):
    found = torch.sin(x @ tree["w"]) ** power
    return {"y": found, "place": x.argmax(), "sum": (x * x).sum()}


FORMS = {
    "grad": lambda f, w, x: torch.func.grad(lambda w: f({"w": w}, x[0])["y"].sum())(w),
    "vmap": lambda f, w, x: torch.func.vmap(lambda x: f({"w": w}, x))(x),
    "vmap of vmap": lambda f, w, x: torch.func.vmap(torch.func.vmap(lambda x: f({"w": w}, x)["y"]))(
        x[None]
    ),
    "vmap of grad": lambda f, w, x: torch.func.vmap(
        torch.func.grad(lambda w, x: f({"w": w}, x)["y"].sum()), in_dims=(None, 0)
    )(w, x),
    "jvp": lambda f, w, x: torch.func.jvp(lambda w: f({"w": w}, x[0], power=3)["y"], (w,), (w,)),
    "jacfwd": lambda f, w, x: torch.func.jacfwd(lambda w: f({"w": w}, x[0])["y"])(w),
    "jacrev": lambda f, w, x: torch.func.jacrev(lambda w: f({"w": w}, x[0])["y"])(w),
    "hessian": lambda f, w, x: torch.func.hessian(lambda x: f({"w": w}, x)["sum"])(x[0]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch.func.jvp
@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("form", FORMS)
def test_transformations(form, device):
    given = [torch.from_numpy(one) for one in (W, X)]
    want = FORMS[form](of_torch, *given)
    found = FORMS[form](iso.torch_function(of_jax), *(one.to(device) for one in given))
    near = lambda a, b: torch.testing.assert_close(a.cpu(), b, check_dtype=False)  # noqa: E731
    jax.tree.map(near, found, want)


def test_in_a_step_and_with_ordinary_gradients():
    function = iso.torch_function(of_jax)
    w, x = (torch.from_numpy(one).to("jax") for one in (W, X))
    step = xs.compile(lambda w: torch.func.grad(lambda w: function({"w": w}, x)["y"].sum())(w))
    for factor in (1, 2, 3):
        want = FORMS["grad"](lambda tree, _: of_torch(tree, x.cpu()), w.cpu() * factor, x.cpu())
        torch.testing.assert_close(step(w * factor).cpu(), want)
    leaf = w.clone().requires_grad_()
    torch.func.vmap(lambda x: function({"w": leaf}, x)["y"])(x).sum().backward()
    other = w.cpu().requires_grad_()
    of_torch({"w": other}, x.cpu())["y"].sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), other.grad)


def test_complex_gradients_are_torchs():
    z = torch.tensor([1 + 2j, -0.5j])
    known = iso.torch_function(lambda z: (z * jnp.conj(z) * z).sum().real)
    want = torch.func.grad(lambda z: (z * z.conj() * z).sum().real)(z)
    torch.testing.assert_close(torch.func.grad(known)(z.to("jax")).cpu(), want)
