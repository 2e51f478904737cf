"""torch_xla's collectives between replicas, where there is one replica.

In SPMD a script is one replica, however many chips a mesh has: XLA places the collectives between
them. These functions return what torch_xla's return at a world size of one, so scripts that call
them keep working, and raise where a second replica is needed.

>>> import torch
>>> x = torch.arange(4.0, device="jax")
>>> all_reduce("sum", x)
tensor([0., 1., 2., 3.], device='jax:0')
>>> all_reduce("sum", x, groups=[[0, 1]])
Traceback (most recent call last):
    ...
ValueError: all_reduce with groups [[0, 1]] needs several replicas, and an SPMD script is one: only group [0] is possible. To compute across the chips, mark tensors with mark_sharding and reduce them with torch's own operators (sum, mean, cat), and XLA places the collectives.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"

_KINDS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)
Groups = Sequence[Sequence[int]] | None
Tensors = torch.Tensor | list[torch.Tensor]


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce over one replica."""
    _check_kind(reduce_type)
    check_groups("all_reduce", groups)
    return inputs.clone() if isinstance(inputs, torch.Tensor) else inputs


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """Gather from one replica.

    Raises:
        ValueError: other replicas are named, or the outputs are too few or too many.
        RuntimeError: a list with `pin_layout=True`.
        TypeError: `value` or `output` is something else.
        IndexError: a tensor has no axis `dim`.
    """
    check_groups("all_gather", groups)
    if isinstance(value, list) and pin_layout:
        raise RuntimeError(
            "all_gather of a list of tensors cannot pin the layout; pass pin_layout=False"
        )
    return _apply("all_gather", value, output, lambda tensor: _expanded(tensor, dim).clone())


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """Reduce over one replica, which gets the only shard.

    Raises:
        ValueError: more shards or other replicas are named.
        TypeError: `input` or `output` is something else.
        IndexError: a tensor has no axis `scatter_dim`.
    """
    _check_kind(reduce_type)
    check_groups("reduce_scatter", groups)
    _check_count("reduce_scatter", "shard_count", shard_count)
    return _apply("reduce_scatter", input, output, lambda t: _expanded(t, scatter_dim) * scale)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Exchange shards with one replica: a copy.

    Raises:
        ValueError: more shards or other replicas are named.
        IndexError: the tensor has no such axis.
    """
    check_groups("all_to_all", groups)
    _check_count("all_to_all", "split_count", split_count)
    return _expanded(_expanded(value, split_dimension), concat_dimension).clone()


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Send the tensor from replica to replica."""
    check_groups("collective_permute", [list(pair) for pair in pairs], same=True)
    return value.clone() if pairs else torch.zeros_like(value)


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """Give every replica the tensors of one: nothing to do."""
    check_groups("collective_broadcast", [[root_ordinal]])
    check_groups("collective_broadcast", groups)


def send(value: torch.Tensor, channel_id: int) -> torch.Tensor:
    """Raises: there is no other replica."""
    raise RuntimeError(_no_partner("send"))


def recv(output: torch.Tensor, channel_id: int) -> torch.Tensor:
    """Raises: there is no other replica."""
    raise RuntimeError(_no_partner("recv"))


def check_groups(op: str, groups: Any, *, same: bool = False) -> None:
    """Raise if a group has other replicas than 0."""
    for group in groups or ():
        members = [group] if isinstance(group, int) else list(group)
        if any(member != 0 for member in members) or (len(members) > 1 and not same):
            raise ValueError(
                f"{op} with groups {groups} needs several replicas, and an SPMD script is one: "
                "only group [0] is possible. To compute across the chips, mark tensors with "
                "mark_sharding and reduce them with torch's own operators (sum, mean, cat), and "
                "XLA places the collectives."
            )


def _no_partner(op: str) -> str:
    return (
        f"{op} needs another replica, and an SPMD script is one. To move a tensor to other chips "
        "give it another layout: isoshard.reshard(tensor, spec), or mark_sharding after "
        "clear_sharding."
    )


def _check_kind(reduce_type: str) -> None:
    if reduce_type not in _KINDS:
        raise ValueError(f"{reduce_type!r} is no reduction; there are {', '.join(_KINDS)}")


def _check_count(op: str, name: str, count: int) -> None:
    if count != 1:
        raise ValueError(
            f"{op} with {name}={count} needs {count} replicas, and an SPMD script is one: pass "
            f"{name}=1, or shard the tensor over the chips with mark_sharding"
        )


def _expanded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"a tensor of shape {tuple(tensor.shape)} has no axis {dim}")
    return tensor


def _apply(op: str, value: Any, output: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a collective to a tensor or to each of a list, into `output` if there is one."""
    if isinstance(value, torch.Tensor):
        if output is None:
            return make(value)
        return output.copy_(make(value))
    kinds = "a tensor or a list of tensors"
    check_list(op, "its input", value, kinds)
    if output is None:
        return [make(tensor) for tensor in value]
    check_list(op, "output", output, kinds)
    if len(output) != len(value):
        raise ValueError(f"{op} got {len(value)} tensors and {len(output)} outputs")
    return [into.copy_(make(tensor)) for tensor, into in zip(value, output, strict=True)]


def check_list(op: str, role: str, value: Any, kinds: str = "a list of tensors") -> None:
    """Refuse what is no list of tensors."""
    if not isinstance(value, list) or not all(isinstance(item, torch.Tensor) for item in value):
        raise TypeError(f"{op} takes {kinds} as {role}, not {type(value).__name__}")
