"""Tensors of two runs, saved and compared, by torch_xla's name.

configure("/tmp/run1"); ..; save("layer1", x); ..       # in one run
configure("/tmp/run2"); ..; save("layer1", x); ..       # in the other
print(compare("/tmp/run1", "/tmp/run2", rtol=1e-3, atol=1e-3))
"""

from __future__ import annotations

import collections
import os
import traceback
from pathlib import Path

import numpy as np
import torch

__all__ = ["compare", "compare_tensors", "configure", "save", "tensor_file_compare"]

Folder = str | os.PathLike[str]

_folder: Path | None = None
_step: int | None = None
_counts: collections.Counter[str] = collections.Counter()


def configure(save_dir: Folder | None) -> None:
    """Choose where `save` writes from now on.

    Args:
        save_dir: a folder; None for nowhere. Without a call it is that of the environment variable
            `MODELCMP_SAVEDIR`.
    """
    global _folder, _step
    _folder = None if save_dir is None else Path(save_dir)
    _step = None
    _counts.clear()


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """Write a tensor to the folder, if there is one.

    Args:
        name: of the tensor; the line of the call for None. Equal names are numbered.
        tensor: on any device.
        step: of training; each has a folder and counts of its own.

    Returns:
        The tensor.
    """
    global _step
    folder = _folder or (
        Path(configured) if (configured := os.environ.get("MODELCMP_SAVEDIR")) else None
    )
    if folder is None:
        return tensor
    if step is not None:
        folder = folder / f"step-{step}"
        if step != _step:
            _step = step
            _counts.clear()
    folder.mkdir(parents=True, exist_ok=True)
    if name is None:
        line = traceback.extract_stack(limit=2)[0]
        name = f"{Path(line.filename).name}.l{line.lineno}"
    torch.save(tensor.detach().cpu(), folder / f"{name}.{_counts[name]}")
    _counts[name] += 1
    return tensor


def compare_tensors(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """Where two CPU tensors differ.

    Args:
        tensor1: one.
        tensor2: the other.
        rtol: what may differ, relative to `tensor2`.
        atol: what may differ besides.
        max_diffs: how many elements are told of.

    Returns:
        A line for each; empty where they are equal.

    >>> print(compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])), end="")
    [1]: 2.0 vs. 2.5
    """
    if tensor1.shape != tensor2.shape:
        return f"Tensors have different shape: {list(tensor1.shape)} vs. {list(tensor2.shape)}\n"
    first, second = (_array_of(tensor) for tensor in (tensor1, tensor2))
    close = np.isclose(first, second, rtol=rtol, atol=atol, equal_nan=True)
    mismatches = np.argwhere(~close)
    lines = [
        f"{mismatch.tolist()}: {first[tuple(mismatch)]} vs. {second[tuple(mismatch)]}\n"
        for mismatch in mismatches[:max_diffs]
    ]
    if len(mismatches) > max_diffs:
        lines.append(f"... aborting after {max_diffs} differences\n")
    return "".join(lines)


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(
        wide if tensor.is_floating_point() or tensor.is_complex() else tensor.dtype
    ).numpy()


def tensor_file_compare(
    path1: Folder, path2: Folder, rtol: float = 1e-05, atol: float = 1e-08, max_diffs: int = 25
) -> str:
    """Where the tensors of two files differ; see `compare_tensors`.

    Args:
        path1: written by `save`.
        path2: likewise.
        rtol: see `compare_tensors`.
        atol: see `compare_tensors`.
        max_diffs: see `compare_tensors`.
    """
    first, second = (torch.load(path, weights_only=True) for path in (path1, path2))
    lines = compare_tensors(first, second, rtol, atol, max_diffs).splitlines()
    if not lines:
        return ""
    name, _, index = Path(path1).name.rpartition(".")
    kind, _, step = Path(path1).parent.name.partition("step-")
    when = f" at step={step}" if step and not kind else ""
    head = f'Changes in saved tensor "{name}" with id={index}{when}\n'
    return head + "".join(f"  {line}\n" for line in lines)


def compare(
    save_dir1: Folder,
    save_dir2: Folder,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """Where the tensors of two folders differ, and which one of them lacks.

    Args:
        save_dir1: written to by `save`.
        save_dir2: likewise.
        rtol: see `compare_tensors`.
        atol: see `compare_tensors`.
        max_diffs: of each tensor.

    Returns:
        The report; empty where all are equal.
    """
    first, second = _saved(Path(save_dir1)), _saved(Path(save_dir2))
    report = ""
    for name in sorted(first | second):
        if name not in first or name not in second:
            missing_in = save_dir2 if name in first else save_dir1
            report += f"Mismatch: {name} not in {missing_in}\n"
            continue
        paths = Path(save_dir1) / name, Path(save_dir2) / name
        report += tensor_file_compare(*paths, rtol=rtol, atol=atol, max_diffs=max_diffs)
    return report


def _saved(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files if path.suffix[1:].isdigit()}
