"""A Flax module as a torch module: its parameters train in torch, JAX computes it.

>>> import jax, torch, isoshard as iso
>>> from flax import nnx
>>> model = iso.torch_module(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
>>> [name for name, _ in model.named_parameters()], model.bias.device
(['bias', 'kernel'], device(type='jax', index=0))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> model(torch.ones(4, 3, device="jax")).square().sum().backward()
>>> optimizer.step()

Parameters share the Flax module's buffers at first; training gives the torch module others, and
the Flax module stays as it is (`model.rebuilt()` gives one with the present values). Variables that
are no parameters are buffers of the torch module, and a call returns their new values into them:
statistics of BatchNorm, counters of random numbers. `train()` and `eval()` do what they do in
torch: an NNX module gets its own `train()` or `eval()`, a Linen module its argument `train` or
`deterministic`, unless the caller gives one. On the `jax` device a call is one entry of the tape,
so it works in `xs.compile` and, the way back, under `iso.jax_function`; after `.to("cpu")` it takes
CPU tensors.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import torch
from jax.sharding import Mesh

from isoshard.core.layout.axis_types import is_typed
from isoshard.torch_bridge.common.argument_types import FlaxObject
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.framework.framework import Torch

from .calling_jax import TorchFunction
from .operand_types import declare_sharding, declared_sharding
from .sources import Arrays, Tree, source_of


class _Level(torch.nn.Module):
    """One level of the dotted names."""

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor under a dotted name, creating the levels on the way."""
        first, _, rest = name.partition(".")
        if rest:
            inside = dict(self.named_children())
            if first not in inside:
                inside[first] = _Level()
                self.add_module(first, inside[first])
            level: Any = inside[first]
            level._register(rest, tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            self.register_parameter(first, tensor)
        else:
            self.register_buffer(first, tensor)


class TorchModule(_Level):
    """A torch module that JAX computes; `torch_module` returns one.

    Args:
        source: what `torch_module` was given, as arrays by name and a pure function of them.

    Raises:
        ValueError: a name cannot be one of torch.

    Example:
        >>> product = torch_module(lambda tree, x: x @ tree["w"], {"w": jax.numpy.ones((3, 2))})
        >>> [(name, tuple(parameter.shape)) for name, parameter in product.named_parameters()]
        [('w', (3, 2))]
        >>> product(torch.ones(1, 3, device="jax")).tolist()
        [[3.0, 3.0]]
    """

    def __init__(self, source: Tree):
        """See `torch_module`."""
        super().__init__()
        vars(self)["_source"], vars(self)["_call"] = source, None
        errors = []
        for kind in ("parameters", "buffers"):
            for name, array in getattr(source, kind).items():
                try:
                    self._register(name, _tensor(array, kind == "parameters"))
                except KeyError as error:
                    errors.append(f"{name} ({error.args[0]})")
        if errors:
            raise ValueError(
                f"torch cannot have modules or tensors with these names of {source.name}: "
                f"{', '.join(errors)}; rename them"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the JAX side.

        Args:
            *args: tensors where it takes arrays, all on the device of the parameters.
            **kwargs: likewise; what is no tensor or array is a constant.

        Returns:
            Its result, with tensors for arrays.

        Raises:
            TypeError: as `TorchFunction`.
            ValueError: the call creates or drops variables.
        """
        if vars(self)["_call"] is None:
            source: Tree = vars(self)["_source"]
            vars(self)["_call"] = TorchFunction(
                _Applied(source.apply), source.name, types=True, reads=True
            )
        parameters = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        buffers_read = buffers
        if torch.is_grad_enabled():  # backward may read them after the call has changed them
            buffers_read = {name: _cloned(buffer) for name, buffer in buffers.items()}
        result, changed = vars(self)["_call"](
            parameters, buffers_read, args, kwargs, training=self.training
        )
        with torch.no_grad():
            for name, new in changed.items():
                buffers[name].copy_(new)
        return result

    def rebuilt(self) -> Any:
        """The Flax module or pytree that this was made of, with the present values.

        Returns:
            A new NNX module, the variables of a Linen module, or the pytree; arrays are shared
            with this module where they can be.
        """
        framework = Torch()
        named: list[tuple[str, torch.Tensor]] = [*self.named_parameters(remove_duplicate=False)]
        named += self.named_buffers(remove_duplicate=False)
        arrays: Arrays = {name: framework.to_jax(t.detach(), name=name) for name, t in named}
        return vars(self)["_source"].joined(arrays)

    def extra_repr(self) -> str:
        """The name of the source."""
        return f"computed by JAX: {vars(self)['_source'].name}"

    def __getstate__(self) -> dict[str, Any]:
        """Copies trace anew."""
        return {**vars(self), "_call": None}


def _tensor(array: jax.Array, is_parameter: bool) -> torch.Tensor:
    """A tensor over the array, which keeps its layout, as its gradient does."""
    tensor = Torch().from_jax(array)
    tensor = torch.nn.Parameter(tensor) if is_parameter else tensor
    layout = array.sharding
    if not isinstance(layout, jax.sharding.NamedSharding):
        return tensor
    return Torch().shard(tensor, cast(Mesh, layout.mesh), layout.spec)


def _cloned(buffer: torch.Tensor) -> torch.Tensor:
    """A copy that has the type of a buffer."""
    copy = buffer.clone()
    if isinstance(buffer, lazy_tensor.LazyTensor) and isinstance(copy, lazy_tensor.LazyTensor):
        layout = declared_sharding(buffer)
        if layout is not None and is_typed(layout.mesh):
            declare_sharding(copy, layout)
    return copy


class _Applied:
    """The source's function; new buffers have no gradient."""

    def __init__(self, apply: Any):
        self.__wrapped__ = apply

    def __call__(
        self, parameters: Arrays, buffers: Arrays, args: Any, kwargs: Any, *, training: bool
    ) -> Any:
        result, changed = self.__wrapped__(parameters, buffers, args, kwargs, training=training)
        return result, jax.lax.stop_gradient(changed)


def torch_module(
    model: FlaxObject,
    variables: FlaxObject = None,
    *,
    init: FlaxObject = None,
    rngs: FlaxObject = None,
) -> TorchModule:
    """Make a torch module of a Flax module, or of a function with a pytree.

    Args:
        model: an `nnx.Module`; a `flax.linen.Module`; a function `apply(tree, *args, **kwargs)`;
            or a pair `(init, apply)` of such functions.
        variables: of a Linen module, its collections; of a function, its pytree.
        init: instead of `variables`, arguments for the Linen module's, or the pair's, `init`: a
            key and example inputs.
        rngs: of a Linen module, a PRNG key for dropout, or keys by name.

    Returns:
        A module on the `jax` device. Parameters have the names of the Flax module, joined by dots,
        its layouts and its buffers.

    Raises:
        TypeError: the arguments do not go together.
        ValueError: a name cannot be one of torch.

    Example:
        >>> from flax import nnx
        >>> model = torch_module(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> model.kernel.shape, model(torch.ones(4, 3, device="jax")).shape
        (torch.Size([3, 2]), torch.Size([4, 2]))
    """
    return TorchModule(source_of(model, variables, init, rngs))
