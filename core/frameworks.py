"""The registry of frameworks, through which core serves types of frameworks it does not import.

Core imports JAX and NumPy only. A bridge adds a framework by registering one object that implements
core's verbs for its types; each verb looks it up first.

>>> class Boxes(Framework):
...     name = "boxes"
...     def owns(self, obj):
...         return type(obj).__name__ == "Box"
...     def full(self, x):
...         return "unsharded"
>>> class Box: ...
>>> framework_of(Box()) is None
True
>>> register(Boxes())
>>> framework_of(Box()).full(Box())
'unsharded'

A verb that the framework does not implement raises:

>>> framework_of(Box()).sharding_of(Box())
Traceback (most recent call last):
    ...
TypeError: sharding_of is not implemented for boxes objects such as Box

>>> unregister("boxes")

Bridges are imported lazily: `on_first(root, loader)` registers a loader, which runs once, at the
first object whose class (or a base of it) is from the package `root`, or at `require(root)`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .errors import ShardingError
from .installation import install_command

if TYPE_CHECKING:
    from .checkpoint.source import Entry, NamedState, Source, TargetArray
    from .checkpoint.store import Sum
    from .layout.uneven import Sizes, UnevenArray
    from .traced.traced_step import TracedStep

Loader = Callable[[], object]

_EXTRAS = ("torch", "flax", "onnx")
"""Frameworks that an extra of the same name installs."""


class Framework:
    """The interface of a bridge: core's verbs for its objects; subclasses override what they have.

    Attributes:
        name: of the framework, e.g. "torch", for `require`.
        warns_of_rules: whether `shard` itself warns of a plan's unused rules.
    """

    name: str = "unknown"
    warns_of_rules: bool = False

    def owns(self, obj: Any) -> bool:
        """Whether `obj` is one of this framework's arrays or modules. Called often: be quick."""
        self._lacks("owns", obj)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> Any:
        """Shard `x` over `mesh`; `spec` is any spelling, or a Plan. Same framework out."""
        self._lacks("shard", x)

    def shard_padded(
        self,
        x: Any,
        mesh: Mesh,
        spec: Any,
        sizes: Any,
        *,
        copy: bool | None = None,
        name: str | None = None,
    ) -> Any:
        """As `shard`, in blocks of any sizes; see `iso.shard(.., uneven="pad")`."""
        raise ShardingError(
            f"uneven='pad' is for arrays and tensors, and {name or 'the argument'} is a "
            f"{type(x).__name__}. Shard its arrays one by one."
        )

    def check_shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> None:
        """Raise what `shard` would raise, and do nothing else. Called for each leaf of a tree."""

    def reshard(self, x: Any, mesh: Mesh | None, spec: Any) -> Any:
        """Change the sharding of `x`; by default over its own mesh."""
        self._lacks("reshard", x)

    def from_local(
        self,
        x: Any,
        mesh: Mesh,
        spec: Any,
        *,
        shape: Any = None,
        copy: bool | None = None,
        name: str | None = None,
    ) -> Any:
        """Create a global array from this process's data; `shape` is the global one, or None."""
        self._lacks("from_local", x)

    def full(self, x: Any) -> Any:
        """Gather `x` to every device."""
        self._lacks("full", x)

    def sharding_of(self, x: Any) -> Any:
        """The NamedSharding of an array, or a dictionary of them by name for a module."""
        self._lacks("sharding_of", x)

    def typeof(self, x: Any) -> Any:
        """The type of an array, as `jax.typeof` of a `jax.Array`."""
        self._lacks("typeof", x)

    def block_sizes(self, x: Any) -> Sizes | None:
        """The valid elements of each block of an array in unequal blocks, per axis; else None."""
        return None

    def call(self, verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a verb of `iso.domain` with arrays of this framework among its arguments."""
        self._lacks(verb.__name__, next(x for x in jax.tree.leaves((args, kwargs)) if self.owns(x)))

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """The arrays of a module by the names for a `Plan`, in order, without copies."""
        self._lacks("named arrays", x)

    def named_modules(self, x: Any) -> list[str] | None:
        """The names of the modules inside `x`, itself ("") included; None if it has none."""
        return None

    def owns_step(self, step: Any) -> bool:
        """Whether a function is this framework's own kind of step, by its class."""
        return False

    def traced_step(
        self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
    ) -> TracedStep:
        """A step of this framework as planning takes it; see `isoshard.core.traced`."""
        self._lacks("traced_step", step)

    def elements(self, x: Any) -> Mapping[str, Any]:
        """The arrays in `x` by name, that of an array under "": NumPy's or JAX's, as stored.

        Nothing is computed or copied; one without local values is a `jax.ShapeDtypeStruct`.
        """
        return {}

    def forward_hooks(self, x: Any) -> list[dict[int, Any]]:
        """The dictionaries of hooks around the computation of a module, which may be changed."""
        return []

    def local_shards(self, x: Any) -> list[Any]:
        """The `Shard`s of `x` on this process, as plain arrays of this framework, not copied."""
        self._lacks("local_shards", x)

    def to_jax(
        self,
        x: Any,
        sharding: NamedSharding | None = None,
        *,
        copy: bool | None = None,
        name: str = "",
    ) -> Any:
        """The same values as a jax.Array (a dictionary of them for a module)."""
        self._lacks("to_jax", x)

    def array(
        self, x: Any, sharding: NamedSharding | None = None, *, copy: bool | None = None
    ) -> Any:
        """One array with all its 64 bits, even while JAX computes with 32."""
        return self.to_jax(x, sharding, copy=copy)

    def weights_of(self, x: Any, *, exact: bool = False) -> dict[str, Any]:
        """The weights of a module by name, as a file of weights has them: tied ones once.

        JAX arrays (if `exact`, of 64 bits too), or shapes (`jax.ShapeDtypeStruct`) where there is
        no memory.
        """
        return self.to_jax(x)

    def other_axes(self, x: Any) -> dict[str, str]:
        """Weights of a module whose axes are not those of a Linear or Conv, and how to map each."""
        return {}

    def to_numpy(self, x: Any) -> np.ndarray:
        """An array in host memory as NumPy sees it, sharing the memory."""
        self._lacks("to_numpy", x)

    def from_jax(
        self, array: jax.Array | UnevenArray, *, copy: bool | None = None, like: Any = None
    ) -> Any:
        """The same values as an array of this framework, with the sharding of `array`.

        `like` is the original NumPy array, whose dtype the result has: JAX may store 64-bit
        integers in 32 bits.
        """
        self._lacks("from_jax", array)

    def on_cpu(self, x: Any, *, copy: bool | None = None) -> Any:
        """An array of JAX or of this framework as a plain, unsharded one on the CPU."""
        self._lacks("on_cpu", x)

    def shard_from_jax(self, array: jax.Array, *, copy: bool | None = None) -> Any:
        """A `jax.Array` on one device (a shard's data) as a plain array of this framework."""
        self._lacks("shard_from_jax", array)

    def parts(
        self, x: Any, saved: Mapping[str, Entry] | None = None
    ) -> dict[str, NamedState] | None:
        """The state of a module or optimizer for a checkpoint, by name; None: `x` is one array.

        `saved` is a checkpoint's entries below the name of `x`: state that `x` has not created yet,
        and would have after a step, is then among the results.
        """
        self._lacks("parts", x)

    def target_array(self, x: Any) -> TargetArray:
        """Shape, logical dtype and sharding of an array, also of an abstract one."""
        self._lacks("target_array", x)

    def stored(self, x: Any) -> tuple[jax.Array | UnevenArray | np.ndarray, str]:
        """The elements of an array, for reading: in host memory as they are, or on devices.

        With them the name of their dtype in this framework.
        """
        self._lacks("stored", x)

    def filled(self, x: Any, values: dict[str, Any]) -> Any:
        """`x` with new state by the names of `parts`, or one array under the name "".

        Modules and optimizers are changed in place; for an array a new one is returned.
        """
        self._lacks("filled", x)

    def open_checkpoint(self, path: str) -> Source | None:
        """The checkpoint in a folder or file, if it is of a format of this framework."""

    def write_checkpoint(self, folder: str, name: str, leaves: dict[str, Any]) -> dict[str, Sum]:
        """Write leaves in this framework's own format into a folder; return files' checksums."""
        self._lacks("write_checkpoint", leaves)

    def processes_joined(self) -> tuple[int, int] | None:
        """Rank and size of the framework's own process group, or None if it has not started."""
        return None

    def start_processes(
        self,
        rank: int,
        size: int,
        *,
        timeout: float,
        post: Callable[[str | None], str] | None = None,
        host: str = "",
        device: int | None = None,
    ) -> None:
        """Start the framework's process group; `init_distributed` calls this in every rank."""

    def broadcast_message(self, word: str | None) -> str:
        """Broadcast rank 0's message to all ranks of the framework's process group."""
        self._lacks("broadcast_message", word)

    def end_processes(self) -> None:
        """End the framework's process group."""

    def _lacks(self, verb: str, obj: Any) -> NoReturn:
        raise TypeError(
            f"{verb} is not implemented for {self.name} objects such as {type(obj).__name__}"
        )


_frameworks: dict[str, Framework] = {}
_loaders: dict[str, Loader] = {}
_lock = threading.RLock()


def register(framework: Framework) -> None:
    """Add a framework, or replace the one of the same name.

    Args:
        framework: does core's verbs for its own objects.
    """
    _frameworks[framework.name] = framework


def unregister(name: str) -> None:
    """Remove a framework, if there is one of that name."""
    _frameworks.pop(name, None)


def on_first(root: str, loader: Loader) -> None:
    """Register the loader of a bridge, for the first object of its framework.

    Args:
        root: top-level package of the framework's classes, e.g. "torch".
        loader: called at most once; it must `register` a framework of that name.
    """
    _loaders[root] = loader


def framework_of(obj: Any) -> Framework | None:
    """The framework that an object belongs to; loads its bridge at the first object.

    Returns:
        The framework, or None: for NumPy, JAX, plain containers and unknown classes.

    Raises:
        ImportError: the bridge could not be loaded.

    Example:
        >>> framework_of(np.zeros(3)) is None
        True
    """
    if isinstance(obj, jax.Array | np.ndarray):
        return None
    if _loaders:
        _load_for(type(obj))
    return next((f for f in _frameworks.values() if f.owns(obj)), None)


def check_no_tensor(obj: Any, verb: str) -> None:
    """Raise TypeError for tensors and modules where arrays are expected."""
    framework = framework_of(obj)
    if framework is not None:
        raise TypeError(
            f"{verb} takes arrays of JAX or NumPy, not a {type(obj).__name__} of {framework.name}; "
            "pass iso.to_jax(x), or shard the tensor with iso.shard(x, mesh, spec, uneven='pad')"
        )


def framework_owning(step: Any) -> Framework | None:
    """The loaded framework whose own kind of step a function is, or None."""
    return next((f for f in _frameworks.values() if f.owns_step(step)), None)


def require(name: str) -> Framework:
    """The framework of a name; loads its bridge if needed.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.

    Example:
        >>> require("fortran")    # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ImportError: there is no framework 'fortran'; the known ones are 'equinox', 'flax', ...
    """
    for _ in range(2):  # a bridge's loader may register a second loader, for the framework itself
        if name not in _frameworks:
            _load(name)
    if name not in _frameworks:
        names = ", ".join(map(repr, sorted({*_EXTRAS, *_frameworks, *_loaders})))
        raise ImportError(f"there is no framework {name!r}; the known ones are {names}")
    return _frameworks[name]


def _load_for(kind: type) -> None:
    for root in {base.__module__.partition(".")[0] for base in kind.__mro__}:
        if root in _loaders:
            _load(root)


def _load(root: str) -> None:
    with _lock:
        loader = _loaders.pop(root, None)
        if loader is None:
            return
        try:
            loader()
        except ModuleNotFoundError as error:
            _loaders[root] = loader
            if (error.name or "").partition(".")[0] != root or root in sys.modules:
                raise
            how = install_command(root) if root in _EXTRAS else f"pip install {root}"
            raise ImportError(f"{root} is not installed; get it with {how}") from None
        except BaseException:
            _loaders[root] = loader
            raise
