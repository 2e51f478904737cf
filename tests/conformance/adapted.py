"""Modules and optimizers of torch's databases as entries, so that the operators' columns try them.

A sample of a module is its forward input, with parameters and buffers as tensors beside it; one of
an optimizer is its parameters, with the point that three steps lead them towards.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .samples import tensors

_SHAPES = ((16, 8), (3, 4))
_STEPS = 3


def modules() -> dict[str, OpInfo]:
    """Every module of torch's database, as `module.nn.Linear` and so on."""
    return {f"module.{info.name}": _of_module(info) for info in module_db}


def optimizers() -> dict[str, OpInfo]:
    """Every optimizer of torch's database, as `optim.Adam` and so on."""
    return {f"optim.{info.name}": _of_optimizer(info) for info in optim_db}


def _of_module(info: ModuleInfo) -> OpInfo:
    def errors(entry: OpInfo, device: Any, **_: Any) -> Iterator[ErrorInput]:
        for error in info.module_error_inputs_func(info, device, torch.float32, False, True):
            yield _refused(_of_call(info, error.module_error_input), error)

    def samples(
        entry: OpInfo, device: Any, dtype: torch.dtype, requires_grad: bool, **_: Any
    ) -> Iterator[SampleInput]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            options = {"device": device, "dtype": dtype, "requires_grad": requires_grad}
            for given in info.module_inputs_func(info, training=training, **options):
                yield _with_state(_of_call(info, given), dtype, requires_grad, training)

    return OpInfo(
        f"module.{info.name}",
        op=_call_module,
        dtypes=frozenset(info.dtypes),
        sample_inputs_func=samples,
        error_inputs_func=errors if info.module_error_inputs_func else None,
        supports_gradgrad=info.supports_gradgrad,
        supports_forward_ad=True,
        supports_out=False,
    )


def _of_call(info: ModuleInfo, given: Any) -> SampleInput:
    made, forward = given.constructor_input, given.forward_input
    build = functools.partial(info.module_cls, *made.args, **made.kwargs)
    args, named = (forward.args, forward.kwargs) if forward else ((), {})
    return SampleInput(tuple(args), kwargs={"named": dict(named), "build": build, "state": None})


def _with_state(
    sample: SampleInput, dtype: torch.dtype, requires_grad: bool, training: bool
) -> SampleInput:
    """The sample with the module made, and what it holds as tensors of the sample."""
    module = sample.kwargs["build"]().to(dtype).train(training)
    if any(isinstance(leaf, UninitializedTensorMixin) for leaf in module.parameters()):
        with torch.no_grad():
            module(*sample.input, **sample.kwargs["named"])
    parameters = {
        name: leaf.detach().clone().requires_grad_(requires_grad and leaf.is_floating_point())
        for name, leaf in module.named_parameters()
    }
    sample.kwargs |= {
        "state": parameters | {name: leaf.clone() for name, leaf in module.named_buffers()},
        "build": functools.partial(copy.deepcopy, module),
    }
    return sample


def _call_module(
    inputs: tuple[Any, ...],
    *,
    named: dict[str, Any],
    build: Callable[[], torch.nn.Module],
    state: dict[str, torch.Tensor] | None,
) -> Any:
    module = build()
    if state is not None:
        return torch.func.functional_call(module, state, inputs, named)
    places = [leaf.device for leaf in tensors((inputs, named))]
    return module.to(places[0])(*inputs, **named) if places else module(*inputs, **named)


def _of_optimizer(info: OptimizerInfo) -> OpInfo:
    def errors(entry: OpInfo, device: Any, **_: Any) -> Iterator[ErrorInput]:
        for error in info.optim_error_inputs_func(device, torch.float32):
            yield _refused(_of_steps(info, error.optimizer_error_input, torch.float32), error)

    def samples(
        entry: OpInfo, device: Any, dtype: torch.dtype, requires_grad: bool, **_: Any
    ) -> Iterator[SampleInput]:
        for together in (False, True) if "foreach" in info.supported_impls else (None,):
            for given in info.optim_inputs_func(device):
                sample = _of_steps(info, given, dtype)
                sample.kwargs["options"] |= {} if together is None else {"foreach": together}
                yield sample

    return OpInfo(
        f"optim.{info.name}",
        op=_steps,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
        sample_inputs_func=samples,
        error_inputs_func=errors if info.optim_error_inputs_func else None,
        supports_autograd=False,
        supports_out=False,
    )


def _of_steps(info: OptimizerInfo, given: Any, dtype: torch.dtype) -> SampleInput:
    made = functools.partial(torch.testing.make_tensor, device="cpu", dtype=dtype)
    params = given.params
    if params is None:
        params = [made(shape, requires_grad=True) for shape in _SHAPES]
    towards = [made(leaf.shape) for leaf in tensors(params)]
    options = dict(given.kwargs)
    return SampleInput(
        params, kwargs={"build": info.optim_cls, "options": options, "towards": towards}
    )


def _steps(
    params: Any,
    *,
    build: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    towards: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The parameters after some steps, and the state as large as they are."""
    optimizer = build(params, **options)
    leaves = tensors(params)

    def distance() -> torch.Tensor:
        optimizer.zero_grad()
        pairs = zip(leaves, towards, strict=True)
        loss = torch.stack([(leaf - goal).square().sum() for leaf, goal in pairs]).sum()
        loss.backward()
        return loss

    for _ in range(_STEPS):
        optimizer.step(distance)
    if build is torch.optim.LBFGS:  # it divides gradients that are rounding by such gradients
        return leaves
    state = pytree.tree_leaves(optimizer.state_dict()["state"])
    kept = [leaf for leaf in state if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return [*leaves, *kept]


def _refused(sample: SampleInput, error: Any) -> ErrorInput:
    return ErrorInput(sample, error_type=error.error_type, error_regex=error.error_regex)
