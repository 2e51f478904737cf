"""Orbax's checkpoints: read by TensorStore alone, written by Orbax itself.

A path may be what `Checkpointer.save` was given, a step of a `CheckpointManager`, or the manager's
folder. Names are paths joined by dots, without the `.value` of a Flax variable.

>>> import tempfile, numpy as np, isoshard as iso, orbax.checkpoint as ocp
>>> with tempfile.TemporaryDirectory() as folder:
...     with ocp.PyTreeCheckpointer() as checkpointer:
...         checkpointer.save(f"{folder}/run", {"w": np.ones((4, 2), np.float32), "epoch": 3})
...     tree = iso.restore(f"{folder}/run", {"w": np.zeros((4, 2), np.float32), "epoch": 0})
>>> tree["w"].sum(), tree["epoch"]
(np.float32(8.0), 3)

Source: orbax-checkpoint 0.11, `_METADATA` and `array_metadatas` of a PyTree checkpoint.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from isoshard.core.errors import CheckpointError

from . import zarr_format
from .source import Block, Entry

_METADATA = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
ITEM = "default"
"""The item of a step that Orbax writes where none is named."""
_PYTHON = ("bool", "int64", "float64")
"""Dtypes as which Orbax stores numbers of Python."""


def opened(path: Path, step: int | None = None) -> OrbaxFolder | None:
    """Open a checkpoint.

    Args:
        path: see the module.
        step: in a manager's folder; the newest unless given.

    Returns:
        The checkpoint; None if Orbax wrote none there.

    Raises:
        CheckpointError: a step has several items, or a file is missing or altered.
    """
    if step is None and (path / _METADATA).exists():
        return OrbaxFolder(path)
    if step is None and ((path / _STEP).exists() or (path / ITEM / _METADATA).exists()):
        return OrbaxFolder(_item(path))
    folders = [file.parent for file in path.glob(f"[0-9]*/{_STEP}")]
    steps = {
        int(folder.name): folder for folder in folders if folder.name.isdecimal()
    }  # others are unfinished
    if not steps or (step is not None and step not in steps):
        return None
    return OrbaxFolder(_item(steps[max(steps) if step is None else step]))


def _item(step: Path) -> Path:
    items = sorted(file.parent.name for file in step.glob(f"*/{_METADATA}"))
    if len(items) != 1:
        raise CheckpointError(
            f"{step} is a step of Orbax with {len(items)} trees of arrays"
            + (f" ({', '.join(items)}); give the folder of one: {step / items[0]}" if items else "")
        )
    return step / items[0]


class OrbaxFolder:
    """A tree of arrays that Orbax wrote; a `Source`.

    Args:
        path: of the folder with `_METADATA`.

    Attributes:
        where: the path.
        entries: all leaves by name.

    Raises:
        CheckpointError: a file is missing or altered.
    """

    def __init__(self, path: Path):
        """See the class."""
        self.where = str(path)
        try:
            self._metadata = json.loads((path / _METADATA).read_text())
            leaves = self._metadata["tree_metadata"].values()
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path / _METADATA} was truncated or altered: {error!r}"
            ) from None
        keys = [
            (tuple(key["key"] for key in leaf["key_metadata"]), leaf["value_metadata"])
            for leaf in leaves
            if not leaf["value_metadata"]["skip_deserialize"]  # None, and what is empty
        ]
        siblings = Counter(path_keys[:-1] for path_keys, _ in keys)
        kinds = {_name(path_keys, siblings): value["value_type"] for path_keys, value in keys}
        self._stored = {_name(path_keys, siblings): ".".join(path_keys) for path_keys, _ in keys}
        self.entries: Mapping[str, Entry] = self._entries(path, kinds)

    def read(self, blocks: Sequence[Block]) -> None:
        """Fill the memory of all blocks; see `Source`."""
        zarr_format.fill(self._open, self.where, blocks)

    def _open(self, name: str) -> Any:
        """A future of an array's store."""
        inner = f"{self._stored[name]}/"
        base = {"driver": "file", "path": f"{Path(self.where).absolute()}/"}
        store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": inner}
        if not self._metadata.get("use_ocdbt", True):
            store = {"driver": "file", "path": f"{base['path']}{inner}"}
        driver = "zarr3" if self._metadata.get("use_zarr3", False) else "zarr"
        return zarr_format.tensorstore().open(
            {"driver": driver, "kvstore": store}, open=True, read=True
        )

    def _entries(self, path: Path, kinds: Mapping[str, str]) -> dict[str, Entry]:
        strings, impls, specs = _json(path / "_strings.json"), _impls(path), _specs(path)
        opening = {name: self._open(name) for name, kind in kinds.items() if kind != "string"}
        entries = {}
        for name, kind in kinds.items():
            stored = self._stored[name]
            if kind == "string":
                entries[name] = Entry.of_value(strings[stored])
                continue
            try:
                store = opening[name].result()
            except ValueError as error:
                raise CheckpointError(f"{path}: {name} is missing or altered: {error}") from None
            dtype, shape, impl = store.dtype.name, tuple(store.shape), impls.get(stored, "")
            if kind == "scalar" and dtype in _PYTHON:
                entries[name] = Entry.of_value(store.read().result().item())
            else:
                logical = str(jax.random.key(0, impl=impl).dtype) if impl else dtype
                entries[name] = Entry(shape, logical, dtype, specs.get(stored), impl=impl)
        return entries


def write(folder: Path, tree: Any) -> None:
    """Write a tree by Orbax.

    Args:
        folder: a new one; `read` and Orbax's `restore` open it.
        tree: of arrays, numbers and strings.

    Raises:
        ImportError: Orbax is not installed.
    """
    try:
        import orbax.checkpoint as orbax
    except ModuleNotFoundError:
        raise ImportError(
            "format='orbax' is written by Orbax, which is not installed; get it with "
            "pip install orbax-checkpoint, or save in our own format"
        ) from None
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def _name(keys: tuple[str, ...], siblings: Counter[tuple[str, ...]]) -> str:
    """Keys joined by dots; the `value` of a Flax variable has the variable's name."""
    boxed = len(keys) > 1 and keys[-1] == "value" and siblings[keys[:-1]] == 1
    return ".".join(keys[:-1] if boxed else keys)


def _impls(path: Path) -> dict[str, str]:
    """The implementations of random keys, by the names of stored arrays."""
    impls = {}
    for file in path.glob("array_metadatas/process_*"):
        for entry in _json(file).get("array_metadatas", ()):
            metadata = entry["array_metadata"]
            if impl := (metadata.get("ext_metadata") or {}).get("random_key_impl"):
                impls[metadata["param_name"]] = impl
    return impls


def _specs(path: Path) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The specs of arrays on a mesh, by the names of stored arrays."""
    specs = {}
    for name, text in _json(path / "_sharding").items():
        sharding = json.loads(text)
        if sharding.get("sharding_type") == "NamedSharding":
            spec = sharding["partition_spec"]
            specs[base64.b64decode(name).decode()] = tuple(
                () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
                for axes in spec
            )
    return specs


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
