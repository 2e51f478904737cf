"""Lists of tensors handed to a collective a few at a time, by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .collectives import Groups, all_gather, all_reduce, check_list, reduce_scatter


class CoalescingBuckets:
    """Calls a function with tensors in buckets of a limited size.

    A tensor that is larger than a bucket goes with the ones before it if they fill less than half
    of a bucket, and together not more than two.

    Args:
        func: takes `(tensors, outputs)`, two lists of one bucket (or two tensors, for a bucket of
            one; outputs is None without `output_list`), and returns the results.
        input_list: the tensors.
        output_list: one for each, or None.
        bucket_cap_mb: size of a bucket in MiB.

    Raises:
        TypeError: one of the lists is none.
        ValueError: they have different lengths.

    >>> parts = []
    >>> tensors = [torch.ones(2**18)] * 3                               # 1 MiB each
    >>> buckets = CoalescingBuckets(lambda t, _: parts.append(len(t)) or t, tensors, None, 2)
    >>> len(buckets()), parts
    (3, [2, 262144])
    """

    def __init__(
        self,
        func: Callable[..., Any],
        input_list: Any,
        output_list: Any = None,
        bucket_cap_mb: int = 160,
    ):
        """See the class."""
        check_list("CoalescingBuckets", "input_list", input_list)
        if output_list is not None:
            check_list("CoalescingBuckets", "output_list", output_list)
            if len(output_list) != len(input_list):
                raise ValueError(
                    f"there are {len(input_list)} tensors and {len(output_list)} outputs"
                )
        self._func = func
        self._inputs = input_list
        self._outputs = output_list
        self._cap = bucket_cap_mb * 2**20
        self._bucket: list[int] = []
        self._size = 0
        self._results: list[Any] = []

    def add(self, tensor: torch.Tensor, idx: int) -> None:
        """Put a tensor into the present bucket."""
        self._bucket.append(idx)
        self._size += tensor.nbytes

    def flush(self) -> None:
        """Call the function with the present bucket, and begin another."""
        bucket, self._bucket, self._size = self._bucket, [], 0
        if not bucket:
            return
        inputs = [self._inputs[idx] for idx in bucket]
        outputs = None if self._outputs is None else [self._outputs[idx] for idx in bucket]
        if len(bucket) == 1:
            self._results.append(self._func(inputs[0], None if outputs is None else outputs[0]))
        else:
            self._results += self._func(inputs, outputs)

    def __call__(self) -> list[Any]:
        """The results, one for each tensor, in order."""
        self._results = []
        for idx, tensor in enumerate(self._inputs):
            total = self._size + tensor.nbytes
            if tensor.nbytes > self._cap and self._size < self._cap / 2 and total <= 2 * self._cap:
                self.add(tensor, idx)
                self.flush()
                continue
            if total > self._cap:
                self.flush()
            self.add(tensor, idx)
        self.flush()
        return self._results


def all_gather_bucketized(
    input_list: list[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: list[torch.Tensor] | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> list[torch.Tensor]:
    """`all_gather` of a list in buckets."""
    if pin_layout:
        raise RuntimeError("all_gather_bucketized cannot pin the layout; pass pin_layout=False")

    def gather(tensors: Any, outputs: Any) -> Any:
        return all_gather(tensors, dim, groups, outputs, pin_layout=False)

    return CoalescingBuckets(gather, input_list, output, bucket_cap_mb)()


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: list[torch.Tensor] | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> list[torch.Tensor]:
    """`reduce_scatter` of a list in buckets."""

    def scatter(tensors: Any, outputs: Any) -> Any:
        return reduce_scatter(
            reduce_type, tensors, scale, scatter_dim, shard_count, groups, outputs
        )

    return CoalescingBuckets(scatter, input_list, output, bucket_cap_mb)()


def all_reduce_bucketized_gradients(
    gradients: list[torch.Tensor],
    scale: float,
    groups: Groups,
    pin_layout: bool,
    bucket_cap_mb: int = 0,
) -> None:
    """`all_reduce` of gradients in buckets, in place."""

    def reduce(tensors: Any, _: Any) -> Any:
        bucket = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return all_reduce("sum", bucket, scale, groups, pin_layout)

    CoalescingBuckets(reduce, list(gradients), None, bucket_cap_mb)()
