"""Stands for `torch.testing._internal.distributed._tensor.common_dtensor` on one process.

One process drives all devices, and rank 0 is "this rank": `self.rank` is 0, and where a test
compares what `to_local()` gives, the piece of the first device is compared. Models that the tests
train (`MLPModule`, `Transformer`, ..) are torch's own.

What a test asserts has kinds. A failed assertion about the number of collectives, about placements
or about the words of an error is noted (`NOTES`), and the test goes on, so that a case tells
whether its values hold; any other ends it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal import common_utils
from torch.utils import _pytree as pytree

from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import distribute_tensor
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .settings import Settings

NOTES: list[tuple[str, str]] = []
"""Kind and words of the assertions that failed in the case that runs."""


@contextlib.contextmanager
def noted(kind: str, why: str = "") -> Iterator[None]:
    """Note a failed assertion of a kind, and go on.

    Args:
        kind: `counts`, `placements`, `private`, or `decided` where a line of a test is known to
            want what isoshard does otherwise; there any error is noted.
        why: said in the place of the assertion's own words.
    """
    try:
        yield
    except Exception as error:
        expected = Exception if kind in ("decided", "private") else AssertionError
        if not isinstance(error, expected) or (Settings.strict and kind == "placements"):
            raise
        NOTES.append((kind, why or _first_line(error)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class _Words(contextlib.AbstractContextManager[Any]):
    """`assertRaisesRegex`: another class of error is a failure, other words are noted."""

    def __init__(self, expected: Any, pattern: str):
        self.expected = expected
        self.pattern = pattern
        self.exception: BaseException | None = None

    def __enter__(self) -> _Words:
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self.expected} was not raised")
        if not isinstance(error, self.expected):
            return False
        self.exception = error
        if not re.search(self.pattern, str(error)):
            NOTES.append(("words", f"{_first_line(error)!r} for {self.pattern!r}"))
        return True


class OnePiece:
    """Compares as rank 0 of several would; mixed into every class of tests."""

    def assertEqual(self, x: Any, y: Any, *rest: Any, **options: Any) -> None:
        """Compare, of tensors on the `jax` device what the first device has."""
        there: Any = super()
        there.assertEqual(_of_the_first(x), _of_the_first(y), *rest, **options)

    def assertRaisesRegex(self, error: Any, pattern: str, *call: Any, **named: Any) -> Any:
        """Expect an error; see `_Words`."""
        if not call:
            return _Words(error, pattern)
        with _Words(error, pattern):
            call[0](*call[1:], **named)
        return None


def _of_the_first(given: Any) -> Any:
    """Tensors as the first device's CPU tensors, in any nesting."""
    return pytree.tree_map_only(torch.Tensor, _on_cpu, given)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ManualTensor):
        return tensor.stacked.detach()[0].cpu()
    return tensor.detach().cpu() if isinstance(tensor, XLAShardedTensor) else tensor


class DTensorTestBase(common_utils.TestCase):
    """The base of DTensor's tests: one process."""

    rank = 0
    backend = "gloo"
    pg_backend = "gloo"
    is_local_tensor_enabled = False

    @property
    def world_size(self) -> int:
        """How many devices a test takes."""
        return Settings.devices

    @property
    def device_type(self) -> str:
        """The device of a test's tensors and meshes."""
        return "jax"

    def build_device_mesh(self) -> Any:
        """All devices of the test in one dimension."""
        return init_device_mesh(self.device_type, (self.world_size,))

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Compare, for there is no other rank."""
        self.assertEqual(x, y, msg)

    def run_subtests(self, configuration: dict[str, Any], test: Any, *args: Any, **kw: Any) -> None:
        """Call a test with every combination of the values of some arguments."""
        for values in itertools.product(*configuration.values()):
            test(*args, **dict(zip(configuration, values, strict=True)), **kw)

    def _test_op(self, mesh: Any, op_call: Callable[..., Any], *args: Any, **named: Any) -> None:
        """An operation of distributed tensors gives what it gives of plain ones."""
        expected = op_call(*args, **named)
        for given, options in DTensorConverter(mesh, args, named):
            self.assertEqual(op_call(*given, **options).full_tensor(), expected)


class DTensorOpTestBase(DTensorTestBase):
    """The base of the tests of operators."""


class DTensorConverter:
    """Arguments with every choice of placements for the tensors among them."""

    def __init__(self, mesh: Any, args: Any, kwargs: Any):
        """`mesh`: of one dimension."""
        self.mesh = mesh
        self.leaves, self.structure = pytree.tree_flatten((tuple(args), kwargs))
        self.plain = True

    def successful(self) -> bool:
        """Whether every tensor was distributed, and there was one."""
        return self.plain and any(isinstance(leaf, torch.Tensor) for leaf in self.leaves)

    def __iter__(self) -> Iterator[Any]:
        """Pairs of positional and named arguments."""
        choices = [self._choices(leaf) for leaf in self.leaves]
        for chosen in itertools.islice(itertools.product(*choices), Settings.choices):
            leaves = [self._placed(*one) for one in zip(self.leaves, chosen, strict=True)]
            yield pytree.tree_unflatten(leaves, self.structure)

    def _choices(self, leaf: Any) -> list[Any]:
        whole = Replicate()
        if not isinstance(leaf, torch.Tensor) or leaf.dtype == torch.bool:
            return [whole]
        count = self.mesh.size()
        split = [axis for axis, size in enumerate(leaf.shape) if size > 1 and size % count == 0]
        return [whole, *map(Shard, split)]

    def _placed(self, leaf: Any, placement: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_neg() or leaf.is_conj():
            self.plain = False
            return leaf
        placed: Any = distribute_tensor(leaf, self.mesh, [placement])
        return torch.nn.Parameter(placed) if isinstance(leaf, torch.nn.Parameter) else placed


def with_comms(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that leaves a test as it is: there is nothing to start."""
    return with_comms if function is None or not callable(function) else function


def with_any_devices(*_: Any, **__: Any) -> Any:
    """In place of what skips a test without GPUs: the `jax` device is an accelerator."""
    return lambda test: test


def skip_unless_torch_gpu(test: Any) -> Any:
    """Likewise."""
    return test


def skip_if_lt_x_gpu(count: int) -> Any:
    """Likewise."""
    return with_any_devices()


def __getattr__(name: str) -> Any:
    if name == "NUM_DEVICES":
        return Settings.devices
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_theirs(), name)


@functools.cache
def _theirs() -> Any:
    """torch's own module, with its imports renamed as those of tests."""
    from . import names, renaming

    found = importlib.util.find_spec(names.COMMON)
    assert found is not None and found.origin is not None
    with mock.patch.object(common_utils, "TEST_PRIVATEUSE1", False):  # it asks such a device more
        module: Any = renaming.load(Path(found.origin))
    parallelize = module.Transformer.parallelize

    def whole(model: Any, mesh: Any, sequence: bool, local_output_for_attn: bool = False) -> Any:
        """The examples give whole tensors, so that no layer has a part of the heads."""
        return parallelize(model, mesh, sequence)

    module.Transformer.parallelize = staticmethod(whole)
    return module
