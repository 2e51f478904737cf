"""`isoshard onnx run`: run an annotated ONNX model on as many devices as it needs.

    isoshard onnx run model.onnx inputs.npz --out outputs.npz
    isoshard onnx run model.onnx inputs.npz --simulate      # on virtual CPU devices

Inputs go by their names in the file. What is printed is how each output lies, and which
collectives the compiled programs have.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import isoshard as iso
from isoshard import onnx
from isoshard.core.kit import counted
from isoshard.onnx_bridge.reading.annotations import choose


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("inputs", type=Path, help="an .npz with an array for each input, by name")
    parser.add_argument("--out", type=Path, metavar="NPZ", help="where to save the outputs")
    parser.add_argument(
        "--simulate", action="store_true", help="on as many virtual CPU devices as the file needs"
    )
    parser.add_argument("--collectives", action="store_true", help="count those of each stage")


def run(args: argparse.Namespace) -> int:
    """Run a model once."""
    try:
        model = onnx.load(args.file)
        if args.simulate:
            iso.simulate_devices(choose(model, args.config).num_devices)
        inputs = _read(args.inputs)
        compiled = onnx.compile(model, config=args.config)
        outputs = compiled(**inputs)
    except (ValueError, iso.errors.DeviceError) as error:
        print(f"isoshard onnx run: {_message(error)}", file=sys.stderr)
        return 2
    names = compiled.layout.graph.outputs
    results: dict[str, Any] = outputs if len(names) > 1 else dict.fromkeys(names, outputs)
    for name, array in results.items():
        print(f"{name}: {array.dtype} {array.shape}, {_where(array)}")
    if args.collectives:
        for stage, text in zip(compiled.layout.stages, compiled.hlo(**inputs), strict=True):
            counts = counted(text).items()
            collectives = ", ".join(f"{count} {kind}" for kind, (count, _) in counts)
            print(f"stage {stage.number}: {collectives or 'no collectives'}")
    if args.out is not None:
        arrays: dict[str, Any] = {name: np.asarray(array) for name, array in results.items()}
        np.savez(args.out, **arrays)
        print(f"wrote {args.out}")
    return 0


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it holds one array without a name: save it by np.savez(path, x=..)")
        return dict(loaded)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None


def _where(array: Any) -> str:
    devices = sorted(device.id for device in array.devices())
    return f"{array.sharding.spec} on devices {devices[0]}-{devices[-1]}"


def _message(error: Exception) -> str:
    return str(error).partition("\n-----")[0]  # JAX adds a note on its own frames
