"""Which modules to wrap one by one: policies, and the walk that applies them.

A policy is called with `module`, `recurse` and `unwrapped_params`, the number of elements in
parameters below it that are in no wrapper yet. With `recurse=True` it says whether to look at the
module's children, with False whether to wrap the module itself.

>>> import functools, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
>>> policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.ReLU})
>>> wrap = lambda module: torch.nn.ModuleDict({"wrapped": module})
>>> model, count = recursive_wrap(model, policy, wrap, set(), set())
>>> model
Sequential(
  (0): Linear(in_features=2, out_features=3, bias=True)
  (1): ModuleDict(
    (wrapped): ReLU()
  )
  (2): Linear(in_features=3, out_features=1, bias=True)
)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from isoshard.torch_bridge.kit import own_modules


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module.

    Args:
        *args: ignored.
        **kwargs: ignored.
    """
    return True


def lambda_auto_wrap_policy(
    module: torch.nn.Module,
    recurse: bool,
    unwrapped_params: int,
    lambda_fn: Callable[[torch.nn.Module], bool],
) -> bool:
    """Wrap the modules that a function chooses.

    Args:
        module: asked about.
        recurse: whether its children are asked about.
        unwrapped_params: ignored.
        lambda_fn: whether to wrap a module.
    """
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: torch.nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[torch.nn.Module]],
) -> bool:
    """Wrap the modules of some classes, a model's layers.

    Args:
        module: asked about.
        recurse: whether its children are asked about.
        unwrapped_params: ignored.
        transformer_layer_cls: the classes.
    """
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: torch.nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[torch.nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[torch.nn.Module]] | None = None,
) -> bool:
    """Wrap modules with many parameters.

    Args:
        module: asked about.
        recurse: whether its children are asked about.
        unwrapped_params: elements of parameters below it that are in no wrapper yet.
        min_num_params: how many of them are many.
        force_leaf_modules: classes whose children are never wrapped.
        exclude_wrap_modules: classes that are not wrapped themselves.
    """
    policy: Any = size_based_auto_wrap_policy
    leaves = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    many = unwrapped_params >= min_num_params
    return many and not isinstance(module, tuple(leaves if recurse else excluded))


# Where torch_xla has the defaults.
vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={torch.nn.MultiheadAttention},
    EXCLUDE_WRAP_MODULES={torch.nn.ModuleList, torch.nn.ModuleDict},
)


def recursive_wrap(
    module: torch.nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., torch.nn.Module],
    ignored_modules: Collection[torch.nn.Module],
    ignored_params: Collection[torch.nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[torch.nn.Module, int]:
    """Wrap the modules that a policy chooses, from the inside out.

    A module that stands in several places is wrapped once, and its wrapper put in all of them. One
    with an attribute `_wrap_overrides` is wrapped with these keywords instead.

    Args:
        module: its children are replaced by their wrappers.
        auto_wrap_policy: see the module's description.
        wrapper_cls: called with a module and `kwargs`.
        ignored_modules: not wrapped, and not looked into.
        ignored_params: not counted.
        only_wrap_children: leave `module` itself unwrapped.
        **kwargs: for `wrapper_cls`.

    Returns:
        The module or its wrapper, and how many elements of parameters were wrapped.

    Raises:
        ValueError: a module below is wrapped by `wrapper_cls` already.
    """
    walk = _Walk(auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, kwargs)
    walk.check(module)
    return walk.wrap(module, only_wrap_children)


class _Walk:
    def __init__(
        self,
        policy: Callable[..., bool],
        wrapper: Callable[..., torch.nn.Module],
        ignored_modules: Collection[torch.nn.Module],
        ignored_params: Collection[torch.nn.Parameter],
        kwargs: dict[str, Any],
    ):
        self._policy = policy
        self._wrapper = wrapper
        self._ignored = {id(module) for module in ignored_modules}
        self._uncounted = {id(parameter) for parameter in ignored_params}
        self._kwargs = kwargs
        self._done: dict[int, tuple[torch.nn.Module, int]] = {}

    def check(self, module: torch.nn.Module) -> None:
        if not isinstance(self._wrapper, type):
            return
        for name, child in module.named_modules():
            if isinstance(child, self._wrapper) and id(child) not in self._ignored:
                raise ValueError(
                    f"{name or 'the module'} is a {self._wrapper.__name__} already; wrap modules "
                    "either one by one, or by an auto_wrap_policy"
                )

    def wrap(
        self, module: torch.nn.Module, only_wrap_children: bool = False
    ) -> tuple[torch.nn.Module, int]:
        if id(module) not in self._done:
            self._done[id(module)] = self._wrap(module, only_wrap_children)
        return self._done[id(module)]

    def _wrap(self, module: torch.nn.Module, only_wrap_children: bool) -> tuple[Any, int]:
        count = sum(p.numel() for p in module.parameters() if id(p) not in self._uncounted)
        if not self._policy(module=module, recurse=True, unwrapped_params=count):
            return module, 0
        wrapped = 0
        for name, child in list(own_modules(module).items()):
            if child is None or id(child) in self._ignored:
                continue
            counted = id(child) in self._done
            new, inside = self.wrap(child)
            setattr(module, name, new)
            wrapped += 0 if counted else inside
        rest = count - wrapped
        if only_wrap_children or not self._policy(
            module=module, recurse=False, unwrapped_params=rest
        ):
            return module, wrapped
        overrides: Any = getattr(module, "_wrap_overrides", {})
        return self._wrapper(module, **{**self._kwargs, **overrides}), count
