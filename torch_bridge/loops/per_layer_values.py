"""An attribute that differs from layer to layer, in a loop that runs the code of one layer.

Every decoder layer of transformers has its index, which its code uses only with a cache. One that
no code uses is no obstacle to a loop, and one that is used would be the first layer's in all of
them. So the layer that a loop runs has a `PerLayerValue` in its place, which may be passed on, and
raises when code computes with it, compares it or indexes by it:

>>> index = PerLayerValue("self_attn.layer_idx", (0, 1))
>>> keep = [index]
>>> ["a", "b"][index]    # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: scanned layers must be identical, but their code uses self_attn.layer_idx, which is 0 in layer 0 and 1 in layer 1; ...
"""  # noqa: E501

from __future__ import annotations

from typing import Any, NoReturn

ALTERNATIVE = (
    'run the layers one after the other in a step of xs.compile(step, repeat="auto"), which makes '
    "loops of what is equal in them"
)


class PerLayerValue:
    """What raises when it is used.

    Args:
        name: of the attribute, with the path of its module in a layer.
        values: of the layers; the two that messages name are different.
    """

    __slots__ = ("name", "values")

    def __init__(self, name: str, values: tuple[Any, ...]):
        """See the class."""
        self.name = name
        self.values = values

    def __reduce__(self) -> Any:
        """A copy has the same values."""
        return PerLayerValue, (self.name, self.values)

    def __repr__(self) -> str:
        """As it would be constructed."""
        return f"PerLayerValue({self.name!r}, {self.values!r})"

    def __getattr__(self, name: str) -> Any:
        """Its type's attributes are not those of a layer's value."""
        if name.startswith("__"):  # copy, inspect and torch look for these in any object
            raise AttributeError(name)
        self._raise()

    def _raise(self, *_: Any) -> NoReturn:
        index = next(n for n, value in enumerate(self.values) if value != self.values[0])
        raise ValueError(
            f"scanned layers must be identical, but their code uses {self.name}, which is "
            f"{self.values[0]!r} in layer 0 and {self.values[index]!r} in layer {index}; "
            f"{ALTERNATIVE}, or pass ignore=({self.name.rpartition('.')[2]!r},) if the first "
            "layer's value is right for all"
        )


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift")
_OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "index", "complex"),
    *("str", "format", "neg", "pos", "abs", "invert", "round", "len", "iter", "contains"),
    *("getitem", "call", "divmod", "rshift", "matmul"),
)
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(PerLayerValue, f"__{_name}__", PerLayerValue._raise)


def is_deferred(value: Any, other: Any) -> bool:
    """Whether two values that differ may be of no use: an index, or a name."""
    return type(value) is type(other) and type(value) in (int, str)
