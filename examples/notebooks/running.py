"""Running a notebook from top to bottom, in a new process of the running Python.

The process has no accelerator, an empty working folder, no start-up files of the user's IPython,
the commands of the running Python, and `pictures`. It has ended when `run` returns.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

KERNEL = "python3"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
    "language_info": {"name": "python"},
}
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(RuntimeError):
    """A notebook did not run to its end."""


def read(path: Path) -> NotebookNode:
    """Read a notebook in the present format."""
    return nbformat.read(path, as_version=4)


def write(path: Path, notebook: NotebookNode) -> None:
    """Write a notebook, without what Jupyter notes of the machine."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def run(notebook: NotebookNode, *, seconds: float) -> NotebookNode:
    """Run all cells in order.

    Args:
        notebook: which; it is left as it is.
        seconds: for the whole notebook.

    Returns:
        A copy with what was computed.

    Raises:
        NotebookError: a cell raised, the time was over, or the process ended.
    """
    fresh = copy.deepcopy(notebook)
    for cell in fresh.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    end = time.monotonic() + seconds
    begun = [0]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            fresh,
            km=_kernel(folder),
            timeout_func=lambda _: max(1, int(end - time.monotonic())),
            resources={"metadata": {"path": _made(folder, "work")}},
            coalesce_streams=True,
            record_timing=False,
            on_cell_execute=lambda cell, cell_index: begun.append(cell_index),
        )
        try:
            client.execute(cleanup_kc=True, env=_environment(folder))
        except CellExecutionError as error:
            outcome = f"raised\n{_COLOR.sub('', str(error))}"
        except CellTimeoutError:
            outcome = f"was running when {seconds:g} s were over"
        except DeadKernelError:
            outcome = "ended the process"
        else:
            return fresh
    raise NotebookError(f"cell {begun[-1] + 1} {outcome}")


class _ThisPython(KernelSpecManager):
    """Knows one kernel: the running Python, whatever is installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """The command that starts it."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def _kernel(folder: str) -> AsyncKernelManager:
    """The process; talks through sockets in a folder, which only this user reads."""
    return AsyncKernelManager(
        kernel_spec_manager=_ThisPython(),
        kernel_name=KERNEL,
        transport="ipc",
        connection_file=str(Path(folder) / "kernel.json"),
    )


def _made(folder: str, name: str) -> str:
    path = Path(folder) / name
    path.mkdir()
    return str(path)


def _environment(folder: str) -> dict[str, Any]:
    beside = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, beside)),
        "IPYTHONDIR": _made(folder, "ipython"),
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
