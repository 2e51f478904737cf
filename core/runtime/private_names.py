"""Private names of other packages: each stated once, with why it is used and what is without it.

A package may rename what it calls private in any version. So isoshard touches such a name in one
place only, a table like this one, whose rows are bound when the table is read:

>>> import numpy as np
>>> table = PrivateNames("numpy", versions="1.26 to 2.4")
>>> norm = table.bind("numpy.linalg.norm", why="gives lengths", without="no length is known")
>>> float(norm([3.0, 4.0]))
5.0

A name that is not there breaks what needs it, and nothing before:

>>> norm = table.bind("numpy.linalg._norm", why="gives lengths", without="no length is known")
>>> norm([3.0, 4.0])    # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
isoshard.core.errors.PrivateNameError: numpy ... has no numpy.linalg._norm, which gives lengths: \
no length is known. numpy 1.26 to 2.4 are known to have it; install one of them.

What an instance carries is read by a function, which looks for it on an example first:

>>> size = table.field(
...     "numpy.dtype.itemsize",
...     example=lambda: np.dtype("int32"),
...     why="counts bytes",
...     without="none are counted",
... )
>>> size(np.dtype("int64"))
8
>>> [row.attribute for row in table]
['norm', '_norm', 'itemsize']
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from isoshard.core.errors import (
    PrivateNameError,
    PrivateNameWarning,
    UntestedVersionWarning,
)

from .user_warnings import warn_user

TRIED = {"jax": "0.9 to 0.12", "torch": "2.10 to 2.15"}
"""The oldest and the newest version of each package that isoshard was tried with."""


_RAISE: Any = object()


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private name of another package.

    Attributes:
        path: the package, its modules, and what is in them: `"torch._C._nn._parse_to"`.
        why: what isoshard does with it, as the end of "which ..".
        without: what happens where it is missing.
        versions: of the package that have it.
        formerly: its path in older ones of these; empty if it is the same.
        substitute: whether something else serves where it is missing.
    """

    path: str
    why: str
    without: str
    versions: str
    formerly: str = ""
    substitute: bool = False

    @property
    def present(self) -> str:
        """The path that the installed version has; `path` if it has neither."""
        for path in (self.path, self.formerly) if self.formerly else ():
            with contextlib.suppress(ImportError, AttributeError):
                _resolved(path)
                return path
        return self.path

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.present.rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """What has it: a module or a class.

        Raises:
            PrivateNameError: it is not there itself.
        """
        try:
            return _resolved(self.present.rpartition(".")[0])
        except (ImportError, AttributeError):
            raise self.error() from None

    def resolve(self, otherwise: Any = _RAISE) -> Any:
        """The object of that name.

        Raises:
            PrivateNameError: there is none, and nothing else was given.
        """
        try:
            return _resolved(self.present)
        except (ImportError, AttributeError):
            if otherwise is _RAISE:
                raise self.error() from None
            return otherwise

    def of(self, instance: Any, *otherwise: Any) -> Any:
        """The attribute of that name.

        Raises:
            PrivateNameError: it does not, and nothing else was given.
        """
        try:
            return getattr(instance, self.attribute, *otherwise)
        except AttributeError:
            raise self.error() from None

    def put(self, instance: Any, value: Any) -> None:
        """Give an object that attribute."""
        setattr(instance, self.attribute, value)

    def wrap(self, make: Callable[[Any], Any]) -> None:
        """Put `make(object)` in the place of the object.

        Raises:
            PrivateNameError: nothing stands there.
        """
        setattr(self.owner, self.attribute, make(self.resolve()))

    def error(self) -> PrivateNameError:
        """The error to raise where the name is needed and missing."""
        package = self.path.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "(no version)")
        return PrivateNameError(
            f"{package} {version} has no {self.path}, which {self.why}: {self.without}. "
            f"{package} {self.versions} are known to have it; install one of them."
        )


class PrivateNames:
    """The private names of a package that isoshard uses, in the order of their declaration.

    Args:
        package: the top-level name.
        versions: that have all of them, unless a row has others.
    """

    def __init__(self, package: str, versions: str):
        """See the class."""
        self.package, self.versions = package, versions
        self._rows: dict[str, PrivateName] = {}

    def warn_if_untested(self) -> None:
        """Warn where the installed package is older or newer than the versions of the table.

        Example:
            >>> import warnings
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     PrivateNames("numpy", versions="1.10 to 1.11").warn_if_untested()
            >>> str(caught[0].message).partition("numpy 1")[2]
            '.10 to 1.11 only; if something fails, install one of these [ISO015]'
        """
        version = importlib.import_module(self.package).__version__
        if not is_tried(version, self.versions):
            warn_user(
                f"{self.package} {version} is installed, and isoshard was tested with "
                f"{self.package} {self.versions} only; if something fails, install one of these",
                UntestedVersionWarning,
            )

    def __iter__(self) -> Iterator[PrivateName]:
        """Every row."""
        return iter(self._rows.values())

    def state(
        self,
        path: str,
        *,
        why: str,
        without: str,
        versions: str | None = None,
        formerly: str = "",
        substitute: bool = False,
    ) -> PrivateName:
        """Add a row, without looking up the name.

        Args:
            path: as in `PrivateName`, whose other arguments are the same too.
            why: what isoshard does with it.
            without: what happens where it is missing.
            versions: that have it.
            formerly: its path in older versions.
            substitute: whether something else serves then.

        Raises:
            ValueError: the path is of another package, or was stated before.
        """
        if path.partition(".")[0] != self.package:
            raise ValueError(f"{path} is no name of {self.package}")
        if path in self._rows:
            raise ValueError(f"{path} is declared already")
        row = self._rows[path] = PrivateName(
            path, why, without, versions or self.versions, formerly, substitute
        )
        return row

    def bind(
        self,
        path: str,
        *,
        otherwise: Any = _RAISE,
        make: Callable[[], Any] | None = None,
        **words: str,
    ) -> Any:
        """Add a row, and return its object.

        Args:
            path: as in `PrivateName`.
            otherwise: what serves in its place.
            make: makes what serves in its place.
            **words: as for `state`.

        Returns:
            The object. Where it is missing, `otherwise`, or what `make` makes; without these, or
            if `make` fails, an `Absent`.
        """
        row = self.state(path, substitute=otherwise is not _RAISE or make is not None, **words)
        value = row.resolve(Absent(path, row.error) if otherwise is _RAISE else otherwise)
        if make is not None and isinstance(value, Absent):
            with contextlib.suppress(Exception):  # what it is made of may be missing as well
                return make()
        return value

    def field(
        self, path: str, *, example: Callable[[], Any] | None = None, **words: Any
    ) -> Callable[[Any], Any]:
        """Add a row for an attribute of instances, and give the function that reads it.

        Args:
            path: of the class, with the attribute.
            example: makes an object that has to have it; not needed where the class has it.
            **words: as for `state`.

        Returns:
            A function of an instance, as fast as `operator.attrgetter`. Where the example has no
            such attribute it raises PrivateNameError when it is called.
        """
        row = self.state(path, **words)
        return operator.attrgetter(row.attribute) if _has(row, example) else Absent(path, row.error)


class Absent:
    """Stands for what is missing: it raises PrivateNameError once it is used.

    To call it, enter it, look into it, ask for instances of it and make an object of a subclass
    are uses. To derive a class from it and to name it in a union of classes are none.

    Args:
        of: the name, for messages of tests.
        error: makes the error that is raised.
    """

    def __init__(self, of: str, error: Callable[[], PrivateNameError]):
        """See the class."""
        self.of, self._error = of, error

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error()

    def __or__(self, other: Any) -> Absent:
        """A union of classes with this one may stand in an alias, and `isinstance` of it raises."""
        return self

    __ror__ = __or__
    __call__ = __enter__ = __exit__ = __instancecheck__ = __iter__ = __contains__ = _raise
    __getitem__ = __setitem__ = _raise

    def __getattr__(self, name: str) -> NoReturn:
        """Doctest, inspect and copy look for double underscores, which is no use of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class may derive from it; making an object of that class raises."""
        return (type("Absent", (), {"__new__": functools.partial(self._raise)}),)


def is_tried(version: str, tried: str) -> bool:
    """Whether a version is within a range; releases of its last version are.

    Example:
        >>> is_tried("2.15.1+cpu", "2.10 to 2.15"), is_tried("2.16", "2.10 to 2.15")
        (True, False)
    """
    oldest, newest = map(release, tried.split(" to "))
    return oldest <= release(version) and release(version)[: len(newest)] <= newest


def release(version: str) -> tuple[int, ...]:
    """The release of a version as numbers.

    Args:
        version: such as "2.13.0+cpu", of which it is (2, 13, 0).
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def or_absent(make: Callable[[], Any]) -> Any:
    """What is made at import, of names that may be missing.

    Returns:
        What it makes; an `Absent` if it raises PrivateNameError.

    Example:
        >>> table = PrivateNames("numpy", versions="1.26 to 2.4")
        >>> gone = table.bind("numpy._gone", why="is not there", without="nothing works")
        >>> isinstance(or_absent(lambda: gone("a").b), Absent)
        True
    """
    try:
        return make()
    except PrivateNameError as error:
        text = str(error)
        return Absent("", lambda: PrivateNameError(text))


@contextlib.contextmanager
def optional() -> Iterator[None]:
    """Context in which a feature is registered: if a name is missing it is off, with a warning.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     with optional():
        ...         raise PrivateNameError("numpy has no numpy._gone")
        >>> print(caught[0].message)
        numpy has no numpy._gone [ISO016]
    """
    try:
        yield
    except PrivateNameError as error:
        warn_user(str(error), PrivateNameWarning)


def _has(row: PrivateName, example: Callable[[], Any] | None) -> bool:
    try:
        return hasattr(row.owner if example is None else example(), row.attribute)
    except (PrivateNameError, ImportError, AttributeError):
        return False


def _resolved(path: str) -> Any:
    """The object of a dotted name: as many modules as there are, then attributes.

    A function may have the name of its module, and hide it: what was imported comes first.
    """
    names = path.split(".")
    value: Any = importlib.import_module(names[0])
    for count, attribute in enumerate(names[1:], 2):
        name = ".".join(names[:count])
        if name in sys.modules:
            value = importlib.import_module(name)
            continue
        try:
            value = getattr(value, attribute)
        except AttributeError:
            value = importlib.import_module(name)
    return value
