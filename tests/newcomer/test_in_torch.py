"""What users of torch do wrong in the first hours, and what they are told."""

import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

from .mistakes import Desk, told


def ones(*shape, **kwargs):
    return torch.ones(*shape, device="jax", **kwargs)


def a_default_device_that_is_not_there(at):
    with torch.device("jax:2"):
        torch.nn.Linear(2, 2)


def an_optimizer_whose_state_stayed_on_the_cpu(at):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.to("jax")
    model(ones(2, 4)).sum().backward()
    optimizer.step()


def lay_out_what_was_computed(at):
    weight = torch.nn.Linear(4, 4).weight
    iso.shard(weight * 2, at.mesh, P())


def a_step_that_branches_on_a_value(at):
    @xs.compile
    def step(x):
        return x * 2 if x.sum() > 1 else x

    step(ones(3))


def a_step_that_lets_a_tensor_out(at):
    out = queue.SimpleQueue()

    @xs.compile
    def step(x):
        out.put(x * 2)
        return x

    for _ in range(3):
        step(ones(3))


def the_tensor_that_a_step_let_out(at):
    out = queue.SimpleQueue()

    @xs.compile
    def step(x):
        y = x * 2
        out.put(y)
        return y.sum()

    for _ in range(3):
        try:
            step(ones(3))
        except xs.CaptureError:
            break
    print([out.get() for _ in range(out.qsize())])


def a_step_that_moves_a_tensor_from_the_cpu(at):
    table = torch.ones(3)
    xs.compile(lambda x: x + table.to("jax"))(ones(3))


def a_backward_outside_of_the_step(at):
    w = ones(3, requires_grad=True)
    xs.compile(lambda: (w * 2).sum())().backward()


def an_optimizer_that_decides_in_python(at):
    w = ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([w])

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    xs.compile(lambda: optimizer.step(closure))()


def a_tensor_whose_array_was_donated(at):
    t = iso.shard(torch.ones(8, 4), at.mesh, P("x"))
    jax.jit(lambda a: a + 1, donate_argnums=0)(iso.to_jax(t))
    print(t)


def jit_of_a_net_with_a_branch(at):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            x = self.linear(x)
            if x.sum() > 0:
                return x
            return -x

    f = iso.jax_function(Net().to("jax"))
    jax.jit(f)(f.params, jnp.ones((2, 3)))


# The class of the error or warning, the mistake, and parts of the message: what, where, how to fix.
MISTAKES = [
    (iso.errors.DeviceError, lambda at: torch.ones(4).to("jax:9"),
     "jax:9", "one device", "iso.shard"),
    (iso.errors.DeviceError, a_default_device_that_is_not_there, "jax:2", "one device"),
    (iso.errors.DeviceError, lambda at: torch.jax.set_device(7), "jax:7", "one device"),
    (RuntimeError, an_optimizer_whose_state_stayed_on_the_cpu,
     "the optimizer's state is on cpu", "optimizer.load_state_dict(optimizer.state_dict())"),
    (TypeError, lambda at: xs.mark_sharding(at.mesh, ones(8, 4), P("x")),
     "takes the tensor first", "mark_sharding(t, mesh, spec)"),
    (TypeError, lambda at: xs.mark_sharding(ones(8, 4), P("x"), at.mesh),
     "not a P: P('x',)", "comes before the spec"),
    (iso.ShardingError, lambda at: xs.mark_sharding(torch.ones(8, 4), at.mesh, ("x", None)),
     "cpu", ".to("),
    (iso.ShardingError, lay_out_what_was_computed, "require grad", "x.detach()"),
    (iso.ShardingError, lambda at: iso.shard(torch.nn.Linear(8, 8), at.mesh, {"wieght": P("x"),
     "bias": P()}),
     "Linear has no tensors called wieght", "weight, bias"),
    (TypeError, lambda at: iso.full(torch.nn.Linear(2, 2)),
     "full takes a tensor", "reshard(module, P())"),
    (NotImplementedError, lambda at: torch.nested.nested_tensor([ones(2), ones(3)]),
     "nested", "mask"),
    (NotImplementedError, lambda at: torch.eye(3).to_sparse().to("jax"),
     "sparse tensors are not on the jax device", ".to_dense()"),
    (xs.CaptureError, lambda at: xs.compile(lambda x: x.sum().item())(ones(3)),
     "test_in_torch.py:", "needs the value of a tensor", "read it outside"),
    (xs.CaptureError, a_step_that_branches_on_a_value, "test_in_torch.py", "torch.where"),
    (xs.CaptureError, a_step_that_lets_a_tensor_out, "test_in_torch.py", "return"),
    (xs.CaptureError, the_tensor_that_a_step_let_out,
     "computed in a call of a compiled step that raised", "Return it from the step"),
    (xs.CaptureError, a_step_that_moves_a_tensor_from_the_cpu, "test_in_torch.py", "argument"),
    (TypeError, lambda at: xs.compile(ones(3)), "xs.compile", "function"),
    (xs.CaptureError, a_backward_outside_of_the_step,
     "backward() was called outside", "Call backward() in the step"),
    (xs.CaptureError, an_optimizer_that_decides_in_python,
     "test_in_torch.py:", "needs the value of a tensor", "torch.where"),
    (iso.ShardingError, lambda at: jnp.sum(ones(3)),
     "a torch tensor of shape (3,) on jax:0", "pass iso.to_jax(tensor)"),
    (RuntimeError, a_tensor_whose_array_was_donated, "donated", "copy=True"),
    (TypeError, jit_of_a_net_with_a_branch,
     "test_in_torch.py:", "Net needs the value of a tensor while JAX traces it", "torch.where"),
    (TypeError, lambda at: iso.jax_function(torch.nn.Linear(3, 3).to("jax"))(jnp.ones((2, 3))),
     "params of Linear are a dictionary of arrays by name", "f(f.params, x)"),
    (TypeError, lambda at: iso.jax_function(3),
     "jax_function takes a module or a function of tensors, not int", "iso.to_jax"),
    (TypeError, lambda at: iso.torch_function(jnp.ones(3)),
     "takes a function of JAX arrays, not ArrayImpl", "iso.to_torch"),
    (TypeError, lambda at: iso.torch_module(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))(torch.ones(2, 3)),
     "Linear got tensors on several devices: jax:0", "move them to one, such as with .to('jax')"),
    (TypeError, lambda at: iso.torch_module(linen.Dense(3)), "variables", "init="),
    (iso.ShardingError, lambda at: jax.jit(lambda x: iso.shard(x, P("x")))(np.ones(8, np.float32)),
     "there is no mesh argument", "iso.shard(x, mesh, P('x'))"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make", "texts"), [(k, m, t) for k, m, *t in MISTAKES])
def test_a_mistake_is_told(kind, make, texts, tmp_path):
    found = told(make, Desk(tmp_path))
    assert isinstance(found, kind), repr(found)
    assert len(texts) > 1 and [text for text in texts if text not in str(found)] == [], str(found)
