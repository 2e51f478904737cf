"""WeightMap: ordered rules between the weights of two models, in both directions.

>>> import numpy as np
>>> weights = WeightMap([
...     Rule("h.{i}.fc.weight", "blocks.{i}.up.kernel", Kernel()),
...     Rule("h.{i}.fc.bias", "blocks.{i}.up.bias"),
... ])
>>> torch_like = {"h.0.fc.weight": np.ones((8, 4)), "h.0.fc.bias": np.ones(8)}
>>> flax_like = weights.apply(torch_like)
>>> {name: leaf.shape for name, leaf in flax_like.items()}
{'blocks.0.up.bias': (8,), 'blocks.0.up.kernel': (4, 8)}
>>> sorted(weights.inverse(flax_like)) == sorted(torch_like)
True

All leaves are checked before any is converted; everything that does not fit is one error:

>>> weights.apply({"h.0.fc.weight": np.ones(8), "h.0.norm": np.ones(4)})
Traceback (most recent call last):
    ...
isoshard.core.weights.weight_errors.WeightError: the weights do not fit the rules (2 errors):
  h.0.norm (4,): no rule takes it
  h.0.fc.weight (8,): Kernel() takes rank 2 to 5, not 1 [Rule('h.{i}.fc.weight', 'blocks.{i}.up.kernel', Kernel())]
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.deprecations import accepts_old, keyword
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.formatting import listed

from .matching import Matching, RuleGroup
from .ops import Kernel as Kernel
from .ops import OpError, StandardKernel
from .running import describe, layouts_of, run_group
from .weight_errors import TRANSPOSED, WeightError, raise_listed
from .weight_rules import Rule

_LINEN_TRANSPOSED = re.compile(r"(^|\.)ConvTranspose_\d+\.kernel$")
"""Linen calls a layer by its class where it has no name."""
_HEAD = "the weights do not fit the rules"


@dataclasses.dataclass(frozen=True, init=False)
class WeightMap:
    """Ordered rules between two models' weights. Immutable and hashable.

    Args:
        rules: the first that takes a leaf decides; those with `tie=True` come on top.
        by_target: names alone do not decide between rules (a `weight` of rank 2 may become a
            kernel or an embedding): the first rule decides whose targets `like` has. Without `like`
            a leaf for which rules differ is an error.

    Raises:
        WeightError: an entry of `rules` is no `Rule`.

    Example:
        >>> weights = WeightMap([Rule("{layer}.weight", "{layer}.kernel", Kernel())])
        >>> weights.apply({"up.weight": np.ones((8, 4))})["up.kernel"].shape
        (4, 8)
    """

    rules: tuple[Rule, ...]
    by_target: bool

    def __init__(self, rules: Sequence[Rule], *, by_target: bool = False):
        """See the class."""
        wrong = [repr(rule) for rule in rules if not isinstance(rule, Rule)]
        if wrong:
            raise WeightError(f"a WeightMap is made of Rules, not of {', '.join(wrong)}")
        object.__setattr__(self, "rules", tuple(rules))
        object.__setattr__(self, "by_target", by_target)

    @property
    def reversed(self) -> WeightMap:
        """The map from targets to sources."""
        return WeightMap([rule.reversed for rule in self.rules], by_target=self.by_target)

    def apply(self, source: Any, *, like: Any = None) -> Any:
        """Convert a tree of weights to the targets.

        Args:
            source: a pytree of NumPy or JAX arrays (or of `jax.ShapeDtypeStruct`), named by their
                paths joined by dots, or a module of a framework with a bridge. Sharded arrays stay
                sharded: results have the sharding that follows from theirs.
            like: the targets' structure: a pytree (of arrays or shapes) or a module. Names, shapes
                and dtypes are compared.

        Returns:
            The weights by name; if `like` is a pytree, that tree with the weights in it.

        Raises:
            WeightError: listing every leaf that no rule takes, that is missing or not in `like`,
                that has another shape or dtype, that two sources become, or whose data would have
                to move between devices.
        """
        leaves = named_weights(source)
        matching, like_leaves = self.match(leaves, like, source)
        layouts, errors = [], list(matching.errors)
        for group in matching.groups:
            try:
                layouts.append(layouts_of(group, leaves))
            except OpError as error:
                errors.append(f"{_format_sources(group, leaves)}: {error} [{group.rule}]")
        errors += _dtype_errors(matching.groups, leaves, like_leaves)
        errors += [
            f"{name}: the rules keep it, and like has only its shape"
            for name in matching.kept
            if like_leaves is not None and isinstance(like_leaves[name], jax.ShapeDtypeStruct)
        ]
        raise_listed(_HEAD, errors)
        targets: dict[str, Any] = {}
        checks = []
        for group, layout in zip(matching.groups, layouts, strict=True):
            results = run_group(group, leaves, layout)
            checks += [(group, results)] if group.rule.untie else []
            targets = {**results, **targets} if group.rule.untie else {**targets, **results}
        _check_ties(checks, targets)
        if like_leaves is not None:
            targets.update({name: like_leaves[name] for name in matching.kept})
        return targets if like is None else filled(like, targets)

    def inverse(self, source: Any, *, like: Any = None) -> Any:
        """Undo `apply`: the sources of a tree of targets, bit for bit.

        Args:
            source: as for `apply`, with the names of the targets.
            like: as for `apply`, with the names of the sources. What rules drop is taken from here.

        Returns:
            As `apply`.

        Raises:
            WeightError: as `apply`; and if a tied weight is not what it is tied to.
        """
        return self.reversed.apply(source, like=like)

    @accepts_old(keyword("given", "leaves"))
    def match(
        self, leaves: Mapping[str, Any], like: Any = None, source: Any = None
    ) -> tuple[Matching, dict[str, Any] | None]:
        """Match the rules with leaves, without converting any.

        Args:
            leaves: weights, or anything with a shape, by name.
            like: as for `apply`.
            source: the module that `leaves` is of, if it is of one.

        Returns:
            The groups with all that does not fit, and the weights of `like` by name.
        """
        like_leaves = None if like is None else named_weights(like)
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        like_shapes = like_leaves and {
            name: tuple(leaf.shape) for name, leaf in like_leaves.items()
        }
        matching = Matching(self.rules, shapes, like_shapes, by_target=self.by_target)
        other = {**_other_axes(source), **_other_axes(like)}
        for name in (*leaves, *(like_leaves or ())):
            if _LINEN_TRANSPOSED.search(name):
                fields = {"weight": "<name of the weight>", "kernel": repr(name)}
                other[name] = TRANSPOSED.format(kind="ConvTranspose", **fields)
        for group in matching.groups if other else ():
            if any(isinstance(op, StandardKernel) for op in group.rule.ops):
                names = [name for layer in (*group.sources, *group.targets) for name in layer]
                matching.errors += [f"{name}: {other[name]}" for name in names if name in other]
        return matching, like_leaves

    def explain(self, source: Any, *, like: Any = None) -> str:
        """Table of what each leaf becomes, a line each, and of what does not fit.

        Args:
            source: as for `apply`.
            like: as for `apply`.

        Returns:
            The table.

        Example:
            >>> import numpy as np
            >>> weights = WeightMap([Rule("{p*}.weight", "{p*}.kernel", Kernel())])
            >>> print(weights.explain({"up.weight": np.ones((8, 4)), "up.bias": np.ones(8)}))
            up.weight (8, 4) -> up.kernel (4, 8)  [Kernel()]
            error: up.bias (8,): no rule takes it
        """
        leaves = named_weights(source)
        matching, _ = self.match(leaves, like, source)
        lines = []
        for group in matching.groups:
            targets = ", ".join(f"{name} {shape}" for name, shape in group.shapes.items())
            how = describe(group.rule)
            lines.append(
                f"{_format_sources(group, leaves)} -> {targets}" + (f"  [{how}]" if how else "")
            )
        lines += [f"{name} {tuple(leaves[name].shape)} is dropped" for name in matching.dropped]
        lines += [f"{name} is kept as it is" for name in matching.kept]
        return "\n".join([*lines, *(f"error: {error}" for error in matching.errors)])


def named_weights(tree: Any, *, exact: bool = False) -> dict[str, Any]:
    """List the weights of a tree or module by name.

    Args:
        tree: a pytree of arrays or shapes, or a module of a framework with a bridge: what a
            checkpoint of it has.
        exact: tensors keep all their bits, also where JAX computes with half of them.

    Returns:
        The weights; those of a module as JAX arrays.

    Raises:
        WeightError: several leaves have the same name, or leaves are no arrays.

    Example:
        >>> named_weights({"up": {"kernel": np.ones(3)}})
        {'up.kernel': array([1., 1., 1.])}
    """
    if _is_leaf(tree):
        framework = framework_of(tree)
        if framework is None:
            raise WeightError(
                f"weights must be a tree of arrays or a module, not {type(tree).__name__}"
            )
        return dict(framework.weights_of(tree, exact=exact))
    named = [(name, _as_array(leaf, exact)) for name, leaf in named_leaves(tree)]
    by_name = dict(named)
    errors = [f"{n}: {type(leaf).__name__}" for n, leaf in named if not hasattr(leaf, "shape")]
    raise_listed("weights are arrays, or have a shape", errors)
    if len(by_name) < len(named):
        names = [name for name, _ in named]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise_listed("names must differ", [f"{name}: several leaves" for name in twice])
    return by_name


def _other_axes(tree: Any) -> dict[str, str]:
    """Weights of a module that are no kernels of a preset, by name: why."""
    framework = framework_of(tree) if tree is not None and _is_leaf(tree) else None
    return {} if framework is None else framework.other_axes(tree)


def filled(like: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree like `like` with the weights in it; for a module the dictionary by name."""
    if _is_leaf(like):
        return dict(leaves)
    names = [name for name, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in names])


def _is_leaf(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return len(leaves) == 1 and leaves[0] is tree


def _as_array(leaf: Any, exact: bool) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    framework = framework_of(leaf)
    if framework is not None:
        return framework.array(leaf) if exact else framework.to_jax(leaf)
    return np.asarray(leaf) if isinstance(leaf, np.generic | int | float) else leaf


def _dtype_errors(
    groups: Sequence[RuleGroup], leaves: Mapping[str, Any], like_leaves: Mapping[str, Any] | None
) -> list[str]:
    """Errors of leaves whose sources differ in dtype, or from that of `like`."""
    errors = []
    for group in groups:
        kinds = {str(leaves[name].dtype) for names in group.sources for name in names}
        if len(kinds) > 1:
            errors.append(
                f"{_format_sources(group, leaves)}: dtypes {', '.join(sorted(kinds))} differ"
            )
            continue
        [kind] = kinds
        for name in group.shapes if like_leaves is not None else ():
            want = str(getattr((like_leaves or {}).get(name), "dtype", kind))
            if want != kind:
                sources = _format_sources(group, leaves)
                errors.append(
                    f"{name}: dtype {kind}, but like has {want}; made of {sources}. Convert it."
                )
    return errors


def _check_ties(
    checks: Sequence[tuple[RuleGroup, dict[str, Any]]], targets: Mapping[str, Any]
) -> None:
    """Raise if weights that the inverse unties differ from what they were tied to."""
    errors = []
    for group, results in checks:
        for name, value in results.items():
            other = targets[name]
            if value is other or isinstance(value, Tracer | jax.ShapeDtypeStruct):
                continue
            xp: Any = np if isinstance(value, np.ndarray) else jnp
            if not bool(xp.array_equal(_bits(value), _bits(other))):
                sources = ", ".join(n for names in group.sources for n in names)
                errors.append(f"{sources}: is tied to {name}, but has other values")
    raise_listed("tied weights differ", errors)


def _bits(array: Any) -> Any:
    """The array's bits as integers, by which equal NaNs are equal."""
    kind = f"uint{8 * array.dtype.itemsize}"
    if array.dtype.kind in "biu" or array.dtype.kind == "c":
        return array
    if isinstance(array, np.ndarray):
        return array.view(kind)
    return jax.lax.bitcast_convert_type(array, kind)


def _format_sources(group: RuleGroup, leaves: Mapping[str, Any]) -> str:
    names = [name for layer in group.sources for name in layer]
    return listed([f"{name} {tuple(leaves[name].shape)}" for name in names], 3)
