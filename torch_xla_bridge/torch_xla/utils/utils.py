"""The helpers of torch_xla that its examples import.

import torch_xla.utils.utils as xu
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from isoshard.torch_bridge.kit import check_env_flag
from isoshard.torch_xla_bridge.session.nested_search import (
    DataWrapper,
    for_each_instance,
    for_each_instance_rewrite,
)

__all__ = [
    "Cleaner",
    "DataWrapper",
    "FnDataGenerator",
    "LazyProperty",
    "SampleGenerator",
    "TimedScope",
    "TmpFolder",
    "as_list",
    "check_env_flag",
    "eprint",
    "flatten_nested_tuple",
    "for_each_instance",
    "for_each_instance_rewrite",
    "get_free_tcp_ports",
    "get_print_fn",
    "getenv_as",
    "list_copy_append",
    "null_print",
    "parallel_work",
    "shape",
    "timed",
]


class Cleaner:
    """Calls a function when it is dropped.

    Args:
        func: takes no arguments.
    """

    def __init__(self, func: Callable[[], Any]):
        """See the class."""
        self.func = func

    def __del__(self):
        """Call it."""
        self.func()


class LazyProperty:
    """A value that is computed at its first use.

    Args:
        gen_fn: makes it.

    >>> LazyProperty(lambda: 3).value
    3
    """

    def __init__(self, gen_fn: Callable[[], Any]):
        """See the class."""
        self._make: Callable[[], Any] | None = gen_fn

    @property
    def value(self) -> Any:
        """The value."""
        if self._make is not None:
            self._value, self._make = self._make(), None
        return self._value


class TmpFolder:
    """A folder that is removed when the object is dropped; `name` is its path."""

    def __init__(self):
        """Make the folder."""
        self.name = tempfile.mkdtemp()
        self.cleaner = Cleaner(functools.partial(shutil.rmtree, self.name))


class _Generator:
    """Gives what a function makes a number of times: in the place of a `DataLoader`."""

    def __init__(self, make: Callable[[], Any], count: int):
        self._make = make
        self._count = count
        self._given = 0

    def __iter__(self) -> _Generator:
        """From the beginning."""
        again = copy.copy(self)
        again._given = 0
        return again

    def __len__(self) -> int:
        """How many steps there are."""
        return self._count

    def __next__(self) -> Any:
        """What the next step gives, until there were enough."""
        if self._given >= self._count:
            raise StopIteration
        self._given += 1
        return self._make()

    def next(self) -> Any:
        """The same as `next(generator)`."""
        return next(self)


class SampleGenerator(_Generator):
    """Gives the same data a number of times.

    Args:
        data: what each step gives.
        sample_count: how many steps there are.

    >>> list(SampleGenerator("batch", 2)), len(SampleGenerator("batch", 2))
    (['batch', 'batch'], 2)
    """

    def __init__(self, data: Any, sample_count: int):
        """See the class."""
        super().__init__(lambda: data, sample_count)


class FnDataGenerator(_Generator):
    """Gives fresh data, and what a function makes of it.

    Args:
        func: makes the target of the data.
        batch_size: first extent of the data.
        gen_tensor: called with the extents; such as `torch.randn`.
        dims: the other extents; `[1]` by default.
        count: how many pairs there are.
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any],
        dims: Sequence[int] | None = None,
        count: int = 1,
    ):
        """See the class."""

        def make() -> tuple[Any, Any]:
            data = gen_tensor(batch_size, *(dims or [1]))
            return data, func(data)

        super().__init__(make, count)


def as_list(t: Any) -> Any:
    """A list with the value; a list or tuple is returned as it is.

    Args:
        t: any value.
    """
    return t if isinstance(t, list | tuple) else [t]


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """An environment variable as a number or flag.

    Args:
        name: the variable.
        type: what it becomes; `bool` reads it as a number.
        defval: what it is if it is not set.

    >>> getenv_as("ISOSHARD_NOT_SET", int, 3)
    3
    """
    text = os.environ.get(name)
    if text is None:
        return defval
    return bool(int(text)) if type is bool else type(text)


def shape(inputs: Any) -> list[int]:
    """The extents of nested lists.

    Args:
        inputs: lists or tuples of equal lengths.

    Raises:
        ValueError: two lists at one depth have different extents.

    >>> shape([[1, 2, 3], [4, 5, 6]])
    [2, 3]
    """
    if not isinstance(inputs, list | tuple):
        return []
    inner = [shape(element) for element in inputs]
    if any(element_shape != inner[0] for element_shape in inner):
        raise ValueError(f"the lists have no common shape: {sorted(map(str, inner))}")
    return [len(inputs), *(inner[0] if inner else [])]


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """The values in nested lists and tuples, in order.

    Args:
        inputs: lists and tuples in any nesting.

    >>> flatten_nested_tuple([1, (2, [3])])
    (1, 2, 3)
    """
    if not isinstance(inputs, list | tuple):
        return (inputs,)
    return tuple(value for element in inputs for value in flatten_nested_tuple(element))


def list_copy_append(ilist: Sequence[Any], item: Any) -> list[Any]:
    """A new list with one more item.

    Args:
        ilist: the list.
        item: the item.
    """
    return [*ilist, item]


def null_print(*args: Any, **kwargs: Any) -> None:
    """Print nothing.

    Args:
        *args: ignored.
        **kwargs: ignored.
    """


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to standard error.

    Args:
        *args: what `print` takes.
        **kwargs: what `print` takes.
    """
    print(*args, file=sys.stderr, **kwargs)


def get_print_fn(debug: bool | int | None = None) -> Callable[..., None]:
    """`eprint` or `null_print`.

    Args:
        debug: whether to print; by default whether `DEBUG` is a number above 0.
    """
    return eprint if (getenv_as("DEBUG", int, 0) if debug is None else debug) else null_print


def timed(
    fn: Callable[[], Any], msg: str = "", printfn: Callable[..., None] | None = eprint
) -> Any:
    """Call a function and print how long it took.

    Args:
        fn: takes no arguments.
        msg: printed before the time.
        printfn: prints it; None for what `get_print_fn()` gives.

    Returns:
        What the function returns.
    """
    with TimedScope(msg, printfn):
        return fn()


class TimedScope(contextlib.AbstractContextManager["TimedScope"]):
    """Context that prints how long it took.

    Args:
        msg: printed before the time.
        printfn: prints it; None for what `get_print_fn()` gives.
    """

    def __init__(self, msg: str = "", printfn: Callable[..., None] | None = eprint):
        """See the class."""
        self._message = msg
        self._print = printfn or get_print_fn()
        self._error: Any = None

    def __enter__(self) -> TimedScope:
        """Start the clock."""
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Print the time, unless an error was set."""
        if self._error is None:
            self._print(f"{self._message}{1000 * (time.perf_counter() - self._start):.3f}ms")

    def set_error(self, error: Any) -> None:
        """Do not print the time.

        Args:
            error: why.
        """
        self._error = error


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """Ports that are free at the moment.

    Args:
        n: how many.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for sock in sockets:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in sockets]


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function with many arguments, in threads.

    Args:
        num_workers: how many threads.
        fn: the function.
        *args: one list for each of its arguments.

    Returns:
        The results, in order. The first error is raised.

    >>> parallel_work(2, pow, [2, 3], [5, 2])
    [32, 9]
    """
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, *args))
