"""Mistakes in compiled steps, and between the frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

from .mistakes import mistake


def ones(*shape, **kwargs):
    return torch.ones(*shape, device="jax", **kwargs)


@mistake(xs.CaptureError, "steps.py:", "needs the value of a tensor", "read it outside")
def a_step_that_reads_its_loss(at):
    xs.compile(lambda x: x.sum().item())(ones(3))


@mistake(xs.CaptureError, "steps.py", "torch.where")
def a_step_that_branches_on_a_value(at):
    @xs.compile
    def step(x):
        return x * 2 if x.sum() > 1 else x

    step(ones(3))


@mistake(xs.CaptureError, "steps.py", "return")
def a_step_that_lets_a_tensor_out(at):
    out = []

    @xs.compile
    def step(x):
        out.append(x * 2)
        return x

    for _ in range(3):
        step(ones(3))
        out[-1].sum().item()


@mistake(
    xs.CaptureError, "made in a call of a compiled step that was refused", "Return it from the step"
)
def the_tensor_that_a_step_let_out(at):
    out = []

    @xs.compile
    def step(x):
        y = x * 2
        out.append(y)
        return y.sum()

    for _ in range(3):
        try:
            step(ones(3))
        except xs.CaptureError:
            break
    print(out[-1])


@mistake(xs.CaptureError, "steps.py", "argument")
def a_step_that_moves_a_tensor_from_the_cpu(at):
    table = torch.ones(3)
    xs.compile(lambda x: x + table.to("jax"))(ones(3))


@mistake(TypeError, "xs.compile", "function")
def compile_the_result_of_a_step(at):
    xs.compile(ones(3))


@mistake(xs.CaptureError, "backward() was called outside", "Call backward() in the step")
def a_backward_outside_of_the_step(at):
    w = ones(3, requires_grad=True)
    xs.compile(lambda: (w * 2).sum())().backward()


@mistake(xs.CaptureError, "steps.py:", "needs the value of a tensor", "torch.where")
def an_optimizer_that_decides_in_python(at):
    w = ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([w])

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    xs.compile(lambda: optimizer.step(closure))()


@mistake(iso.ShardingError, "a torch tensor of shape (3,) on jax:0", "give it iso.to_jax(tensor)")
def a_tensor_in_jax_numpy(at):
    jnp.sum(ones(3))


@mistake(iso.ShardingError, "a torch tensor of shape (3,) on jax:0", "give it iso.to_jax(tensor)")
def a_tensor_in_jit(at):
    jax.jit(lambda x: x + 1)(ones(3))


@mistake(TypeError, "unsupported operand type(s) for +", "'XLAShardedTensor'")
def a_tensor_beside_an_array(at):
    jnp.ones(3) + ones(3)


@mistake(TypeError, "argument 'input' (position 1) must be Tensor", "ArrayImpl")
def an_array_in_torch(at):
    torch.sum(jnp.ones(3))


@mistake(TypeError, "unsupported operand type(s) for +", "ArrayImpl")
def an_array_beside_a_tensor(at):
    ones(3) + jnp.ones(3)


@mistake(RuntimeError, "donated", "copy=True")
def a_tensor_whose_array_was_donated(at):
    t = iso.shard(torch.ones(8, 4), at.mesh, P("x"))
    jax.jit(lambda a: a + 1, donate_argnums=0)(iso.to_jax(t))
    print(t)


@mistake(RuntimeError, "donated", "copy=True")
def a_sum_of_a_tensor_whose_array_was_donated(at):
    t = iso.shard(torch.ones(8, 4), at.mesh, P("x"))
    jax.jit(lambda a: a + 1, donate_argnums=0)(iso.to_jax(t))
    (t + 1).sum().item()


@mistake(
    jax.errors.ConcretizationTypeError,
    "steps.py:",
    "reads the value of a tensor",
    "torch.where or torch.cond",
)
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


@mistake(TypeError, "params of Linear are a dictionary of arrays by name", "f(f.params, x)")
def a_jax_function_without_its_parameters(at):
    iso.jax_function(torch.nn.Linear(3, 3).to("jax"))(jnp.ones((2, 3)))


@mistake(TypeError, "params of Linear are a dictionary of arrays by name", "f(f.params, x)")
def a_jax_function_without_its_parameters_in_jit(at):
    jax.jit(iso.jax_function(torch.nn.Linear(3, 3).to("jax")))(jnp.ones((2, 3)))


@mistake(TypeError, "jax_function takes a module or a function of tensors, not int", "iso.to_jax")
def a_jax_function_of_a_number(at):
    iso.jax_function(3)


@mistake(TypeError, "takes a function of JAX arrays, not ArrayImpl", "iso.to_torch")
def a_torch_function_of_an_array(at):
    iso.torch_function(jnp.ones(3))


@mistake(
    iso.CopyError, "computed from tensors that require grad", "x.detach()", "isoshard.jax_function"
)
def an_array_of_what_has_a_graph(at):
    iso.to_jax(ones(3, requires_grad=True) * 2)


@mistake(iso.CopyError, "copy=False", "copy=None")
def share_what_lies_otherwise(at):
    iso.to_jax(torch.ones(8, 4).t(), copy=False)


@mistake(iso.CopyError, "float64", "dtype='float32'")
def a_float64_tensor_in_jax(at):
    iso.to_jax(ones(3, dtype=torch.float64))


@mistake(TypeError, "to_torch takes a NumPy array, a jax.Array", "given was str")
def to_torch_of_a_string(at):
    iso.to_torch("weights")


@mistake(
    TypeError,
    "Linear got tensors on several devices: jax:0",
    "move them to one, such as with .to('jax')",
)
def a_torch_module_called_on_a_cpu_tensor(at):
    iso.torch_module(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))(torch.ones(2, 3))


@mistake(TypeError, "variables", "init=")
def a_torch_module_of_a_linen_module_alone(at):
    iso.torch_module(linen.Dense(3))


@mistake(iso.ShardingError, "no mesh is given", "iso.shard(x, mesh, P('x'))")
def a_layout_without_a_mesh_in_jit(at):
    jax.jit(lambda x: iso.shard(x, P("x")))(np.ones(8, np.float32))
