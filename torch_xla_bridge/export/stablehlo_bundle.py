"""A program in StableHLO with its weights: what it is made of, and its folder on disk.

The folder has torch_xla's layout:

```
functions/forward.meta       names, shapes and dtypes of inputs and outputs, JSON
functions/forward.bytecode   StableHLO, portable bytecode
functions/forward.mlir       StableHLO, text
data/<name>                  a parameter or buffer, as `numpy.save` writes it
constants/<number>           a constant, likewise
```
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class StableHLOExportOptions:
    """How a program is exported.

    Attributes:
        include_human_readable_text: keep the program as text as well.
        override_tracing_arguments: example arguments; those of the exported program if None.
        override_tracing_kwargs: must be empty.
        save_weights: write weights to disk.
        inline_all_constant: does nothing: numbers are part of the program.
        export_weights: keep weights beside the program.
        custom_ops_allowed_in_graph: must be empty.
        export_node_metadata: must be False.
    """

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[Any, ...] | None = None
    override_tracing_kwargs: dict[str, Any] | None = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = dataclasses.field(default_factory=set)
    export_node_metadata: bool = False


class VariableType(enum.Enum):
    """Where an input of a program comes from."""

    INPUT_ARG = "input_arg"
    PARAMETER = "parameter"
    CONSTANT = "constant"


@dataclasses.dataclass
class VariableSignature:
    """Shape and dtype of an input or output.

    Attributes:
        shape: extents.
        dtype: a name such as `"float32"`.
        dynamic_dims: axes without a fixed extent; always empty.
    """

    shape: list[int]
    dtype: str
    dynamic_dims: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class InputLocation:
    """Where to find an input.

    Attributes:
        type_: among arguments, parameters or constants.
        position: its number among arguments or constants.
        name: of the parameter or buffer.
    """

    type_: VariableType
    position: int = -1
    name: str = ""

    @classmethod
    def parameter(cls, name: str) -> InputLocation:
        """A parameter or buffer."""
        return cls(VariableType.PARAMETER, name=name)

    @classmethod
    def input_arg(cls, position: int) -> InputLocation:
        """An argument, counted after flattening."""
        return cls(VariableType.INPUT_ARG, position=position)

    @classmethod
    def constant(cls, position: int) -> InputLocation:
        """A constant."""
        return cls(VariableType.CONSTANT, position=position)


@dataclasses.dataclass
class StableHLOFunctionMeta:
    """What is known of a program besides its code.

    Attributes:
        name: `"forward"`.
        stablehlo_version: of the bytecode; `"0.0.0"` if it says so itself.
        input_signature: one for each input.
        output_signature: one for each output.
        input_locations: one for each input.
        unused_inputs: arguments that the program does not take.
        input_pytree_spec: how arguments are nested, as torch writes it.
        output_pytree_spec: how results are nested.
    """

    name: str
    stablehlo_version: str
    input_signature: list[VariableSignature]
    output_signature: list[VariableSignature]
    input_locations: list[InputLocation]
    unused_inputs: list[tuple[InputLocation, VariableSignature]]
    input_pytree_spec: str | None = None
    output_pytree_spec: str | None = None


@dataclasses.dataclass
class StableHLOFunc:
    """A program.

    Attributes:
        meta: see `StableHLOFunctionMeta`.
        bytecode: StableHLO.
        text: StableHLO to be read, or None.
    """

    meta: StableHLOFunctionMeta
    bytecode: bytes
    text: str | None


@dataclasses.dataclass
class StableHLOModelBundle:
    """A program with its weights.

    Attributes:
        state_dict: parameters and buffers by name.
        additional_constants: other tensors that the program takes.
        stablehlo_funcs: the programs.
    """

    state_dict: dict[str, np.ndarray]
    additional_constants: list[np.ndarray]
    stablehlo_funcs: list[StableHLOFunc]


def save(bundle: StableHLOModelBundle, folder: str | os.PathLike[str], *, weights: bool) -> None:
    """Write a bundle to a folder.

    Args:
        bundle: what to write.
        folder: made if it is not there.
        weights: whether parameters and buffers are written.
    """
    root = pathlib.Path(folder)
    names = ["functions", "constants", *(["data"] if weights else [])]
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    if weights:
        for name, array in bundle.state_dict.items():
            _save_array(root / "data" / name, array)
    for index, array in enumerate(bundle.additional_constants):
        _save_array(root / "constants" / str(index), array)
    for function in bundle.stablehlo_funcs:
        stem = root / "functions" / function.meta.name
        stem.with_suffix(".meta").write_text(json.dumps(_plain(function.meta)))
        stem.with_suffix(".bytecode").write_bytes(function.bytecode)
        if function.text is not None:
            stem.with_suffix(".mlir").write_text(function.text)


def load(folder: str | os.PathLike[str]) -> StableHLOModelBundle:
    """Read a bundle that `save` or torch_xla wrote.

    Args:
        folder: its place.

    Raises:
        FileNotFoundError: there is no bundle.
    """
    root = pathlib.Path(folder)
    functions = [_load_function(path) for path in sorted((root / "functions").glob("*.meta"))]
    if not functions:
        raise FileNotFoundError(
            f"{root} has no program in functions/*.meta; write one with save_as_stablehlo"
        )
    dtypes: dict[Any, str] = {}
    for function in functions:
        signatures = function.meta.input_signature
        for where, signature in zip(function.meta.input_locations, signatures, strict=True):
            dtypes[where.type_, where.name or where.position] = signature.dtype
    data = root / "data"
    state = {
        path.name: _load_array(path, dtypes.get((VariableType.PARAMETER, path.name)))
        for path in (sorted(data.iterdir()) if data.is_dir() else ())
    }
    numbered = sorted((root / "constants").iterdir(), key=lambda path: int(path.name))
    constants = [
        _load_array(path, dtypes.get((VariableType.CONSTANT, index)))
        for index, path in enumerate(numbered)
    ]
    return StableHLOModelBundle(state, constants, functions)


def _load_function(path: pathlib.Path) -> StableHLOFunc:
    raw = json.loads(path.read_text())
    fields: dict[str, Any] = {
        **raw,
        "input_signature": [VariableSignature(**entry) for entry in raw["input_signature"]],
        "output_signature": [VariableSignature(**entry) for entry in raw["output_signature"]],
        "input_locations": [_location(entry) for entry in raw["input_locations"]],
        "unused_inputs": [
            (_location(where), VariableSignature(**entry)) for where, entry in raw["unused_inputs"]
        ],
    }
    meta = StableHLOFunctionMeta(**fields)
    text = path.with_suffix(".mlir")
    return StableHLOFunc(
        meta,
        path.with_suffix(".bytecode").read_bytes(),
        text.read_text() if text.exists() else None,
    )


def _location(raw: dict[str, Any]) -> InputLocation:
    return InputLocation(VariableType(raw["type_"]), raw["position"], raw["name"])


def _plain(node: Any) -> Any:
    """Dataclasses as dictionaries, for JSON."""
    if isinstance(node, enum.Enum):
        return node.value
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: _plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
    if isinstance(node, list | tuple):
        return [_plain(item) for item in node]
    return node


def _save_array(path: pathlib.Path, array: np.ndarray) -> None:
    if array.dtype.kind == "V":  # bfloat16 and its like, which NumPy's files do not know
        array = array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _load_array(path: pathlib.Path, dtype: str | None) -> np.ndarray:
    with path.open("rb") as file:
        array = np.load(file, allow_pickle=False)
    if dtype is None or array.dtype.name == dtype:
        return array
    return array.view(jnp.dtype(dtype))
