"""Weights to safetensors files, from shards and without gathering them on a device.

    iso.save_safetensors("out/", params)                        # a folder as Hugging Face's
    iso.save_safetensors("out/", model, config=model.config)    # that from_pretrained reads
    iso.save_safetensors("out.safetensors", weights.inverse(flax_params))

Each file is written block of rows by block of rows, so the host needs memory for one block only.
Files appear under their names when they are complete, the index last.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from isoshard.core.deprecations import accepts_old, keyword
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.uneven import UnevenArray, is_uneven, padded_of
from isoshard.core.layout.valid_elements import ShardElements, local_elements
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .file_format import pack_header
from .folder import CONFIG, FILE, INDEX
from .weight_errors import WeightError, raise_listed
from .weight_map import named_weights

CHUNK = 16 << 20  # bytes
LARGEST = 5_000_000_000  # bytes of a file, as Hugging Face's


@accepts_old(keyword("max_file_bytes", "max_shard_size"))
def save_safetensors(
    path: str | Path,
    tree: Any,
    *,
    max_shard_size: int | str = LARGEST,
    config: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write weights as a safetensors file, or as a folder of them with an index.

    Args:
        path: a file, if it ends in `.safetensors`; else a folder, which is made. There must be no
            weights yet.
        tree: a pytree of NumPy or JAX arrays named by their paths, or a module of a framework with
            a bridge. An array that is in it twice (tied) is written once, under its first name;
            the metadata notes the other. An `UnevenArray` is written without its padding.
        max_shard_size: the largest size of the tensors in one file of a folder, in bytes or as
            `transformers` writes it: "500MB", "5GB" (powers of 1,000), "2GiB" (of 1,024). A larger
            tensor gets a file of its own.
        config: the model's configuration, written as `config.json`, so that `from_pretrained` reads
            the folder: a mapping, or an object with `to_dict` as those of `transformers`. None
            writes no such file. Of a model that is saved with its own `config`, the file also has
            the name of the class, as `save_pretrained` writes it.
        metadata: strings by name. `{"format": "pt"}` unless given, as `transformers` requires.

    Returns:
        The files of weights, the index last if there is one.

    Raises:
        FileExistsError: there are weights at `path`, or another `config.json`.
        ValueError: `max_shard_size` is no size, or `config` is passed with the path of a file.
        TypeError: `config` is neither a mapping nor has `to_dict`.
        WeightError: arrays are partly on devices of other processes, or are traced or only shapes.
        FileFormatError: a dtype has no code in the format.

    Example:
        >>> import numpy as np
        >>> [file.name for file in save_safetensors("out", {"w": np.ones((2, 3), np.float32)})]
        ['model.safetensors']
        >>> layers = {f"{n}.w": np.ones((256, 1024), np.float32) for n in range(3)}  # 1 MiB each
        >>> len(save_safetensors("sharded", layers, max_shard_size="2MiB", config={"n_layers": 3}))
        3
    """
    path = Path(path)
    largest = _size(max_shard_size)
    settings = None if config is None else _config_text(config, tree)
    if settings is not None and path.suffix == ".safetensors":
        raise ValueError(
            f"config= is written to a folder, next to the weights, and {path} is a file: pass a "
            "path without .safetensors"
        )
    weights = _weights(tree)
    elsewhere = [
        f"{name}: {tuple(x.shape)} by {getattr(x, 'sharding', None)}"
        for name, x in weights.items()
        if not (isinstance(x, np.ndarray) or _is_complete(x))
    ]
    fix = "Gather them in every process (iso.full) and save in one, or save a checkpoint: iso.save."
    raise_listed("this process does not have the weights", elsewhere, WeightError, fix)
    tied = _ties(weights)
    untied = {name: x for name, x in weights.items() if name not in tied}
    notes = {"format": "pt", **tied} if metadata is None else {**tied, **metadata}
    if path.suffix == ".safetensors":
        _check_absent(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return [_written(path, untied, notes)]
    path.mkdir(parents=True, exist_ok=True)
    for existing in sorted(path.glob("*.safetensors*")):
        _check_absent(existing)
    if settings is not None:
        _write_config(path / CONFIG, settings)
    return _folder(path, untied, notes, largest)


def _size(size: int | str) -> int:
    """A size in bytes.

    >>> _size(600), _size("500MB"), _size("1.5 GiB")
    (600, 500000000, 1610612736)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
        if match is not None and not (match[3] and not match[2]):
            power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
            size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"max_shard_size must be a number of bytes, or a size such as '500MB' or '2GiB', and "
            f"got {size!r}"
        )
    return size


def _config_text(config: Any, tree: Any) -> str:
    """A model's configuration in JSON."""
    if isinstance(config, Mapping):
        entries = dict(config)
    elif hasattr(config, "to_json_string"):  # of transformers: also turns dtypes into JSON
        entries = json.loads(config.to_json_string())
    elif hasattr(config, "to_dict"):
        entries = dict(config.to_dict())
    else:
        raise TypeError(
            f"config must be a mapping or have to_dict(), and got a {type(config).__name__}"
        )
    if getattr(tree, "config", None) is config and not entries.get("architectures"):
        entries["architectures"] = [type(tree).__name__]
    return json.dumps(entries, indent=2, sort_keys=True) + "\n"


def _write_config(file: Path, text: str) -> None:
    """Write a configuration, unless it is there."""
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise FileExistsError(
            f"{file} exists already with other settings, and is not overwritten. Remove it, or "
            "pass another path."
        )
    waiting = file.with_name(f"{file.name}.part")
    waiting.write_text(text, encoding="utf-8")
    waiting.replace(file)


def _weights(tree: Any) -> dict[str, Any]:
    """The weights by name; an array in blocks of unequal sizes is a leaf."""
    if is_uneven(tree):
        raise WeightError(
            "weights must be a tree of arrays or a module, not an UnevenArray: give it a name, "
            "{'w': u}"
        )
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_uneven)
    blocks = {path_name(path): leaf for path, leaf in leaves if is_uneven(leaf)}
    if not blocks:
        return named_weights(tree, exact=True)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_uneven(x) else x,
        tree,
        is_leaf=is_uneven,
    )
    return named_weights(shapes, exact=True) | blocks


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _folder(
    folder: Path, weights: Mapping[str, Any], notes: Mapping[str, str], largest: int
) -> list[Path]:
    groups: list[dict[str, Any]] = [{}]
    size = 0
    for name, array in weights.items():
        if groups[-1] and size + _nbytes(array) > largest:
            groups.append({})
            size = 0
        groups[-1][name] = array
        size += _nbytes(array)
    if len(groups) == 1:
        return [_written(folder / FILE, groups[0], notes)]
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    files = [
        _written(folder / name, group, notes) for name, group in zip(names, groups, strict=True)
    ]
    file_of = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    total = sum(map(_nbytes, weights.values()))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    waiting = folder / f"{INDEX}.part"
    waiting.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, waiting.replace(folder / INDEX)]


def _written(file: Path, weights: Mapping[str, Any], notes: Mapping[str, str]) -> Path:
    """Write one file, under a temporary name until it is complete."""
    header = pack_header(
        {n: (np.dtype(x.dtype), tuple(x.shape)) for n, x in weights.items()}, notes
    )
    waiting = file.with_name(f"{file.name}.part")
    try:
        with waiting.open("wb") as out:
            out.write(header)
            for array in weights.values():
                for block in _blocks(array):
                    out.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
            out.flush()
            os.fsync(out.fileno())
        return waiting.replace(file)
    except BaseException:
        waiting.unlink(missing_ok=True)
        raise


def _blocks(array: Any) -> Iterator[np.ndarray]:
    """The rows of an array in order, a chunk at a time, assembled from its shards."""
    if isinstance(array, np.ndarray):
        yield array.astype(array.dtype.newbyteorder("="), copy=False)
        return
    inner = padded_of(array)
    if inner is array and (inner.is_fully_replicated or not inner.ndim):
        yield np.asarray(inner.addressable_shards[0].data)
        return
    local = local_elements(array)
    distinct = [shard for shard in local if shard.replica_id == 0]
    shards = (
        [shard for shard in local if shard.device == local[0].device]
        if inner.is_fully_replicated
        else distinct
    )
    row = max(math.prod(array.shape[1:]) * array.dtype.itemsize, 1)
    ends = {end for shard in shards for end in _rows(shard)}
    for first in range(0, array.shape[0], max(CHUNK // row, 1)):
        ends.add(first)
    starts = sorted(ends)
    on_host: dict[int, np.ndarray] = {}
    for low, high in itertools.pairwise(starts):
        block = np.empty((high - low, *array.shape[1:]), array.dtype)
        for index, shard in enumerate(shards):
            start, stop = _rows(shard)
            if start <= low and high <= stop:
                if index not in on_host:
                    on_host[index] = np.asarray(shard.buffer)[shard.valid.inside]
                rows = on_host[index][low - start : high - start]
                block[(slice(None), *shard.valid.index[1:])] = rows
            elif stop <= low:
                on_host.pop(index, None)
        yield block


def _is_complete(array: Any) -> bool:
    """Whether this process has all of an array, and it is no traced value or shape."""
    array = padded_of(array)
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return False
    return array.is_fully_addressable or array.is_fully_replicated


def _rows(shard: ShardElements) -> tuple[int, int]:
    return shard.valid.index[0].start, shard.valid.index[0].stop


def _ties(weights: Mapping[str, Any]) -> dict[str, str]:
    """Names of arrays that have an earlier name, with that name."""
    first: dict[int, str] = {}
    tied = {}
    for name, array in weights.items():
        first_name = first.setdefault(id(array), name)
        if first_name != name and isinstance(array, jax.Array | UnevenArray):
            tied[name] = first_name
    return tied


def _check_absent(path: Path) -> None:
    if path.exists():
        raise FileExistsError(
            f"{path} exists already, and weights are not overwritten. Remove it, or pass another "
            "path."
        )
