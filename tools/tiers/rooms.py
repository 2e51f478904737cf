"""Steps that run where their rooms changed: the folders that a step is about, and what they held.

`python -m tools.tiers.rooms torch-xla` says whether these rooms are as they were when the step last
passed and was noted (exit code 0), or not (1); `--note` notes that it passed. A step has rooms
because it is long and its subject narrow: a change elsewhere runs it in `make test-all`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import record, sources

KEPT = sources.ROOT / "tools" / "tiers" / "rooms.json"
_XLA = (
    "torch_bridge/torch_xla",
    "torch_bridge/torch_xla_backend",
    "torch_bridge/spmd",
    "torch_bridge/xla_alias.py",
    "torch_bridge/drop_in.py",
)
_DOMAIN = ("core/nn", "core/domain", "torch_bridge/domain.py", "examples/domain")
ROOMS = {
    "torch-xla": (
        *_XLA,
        "torch_bridge/session",
        "torch_bridge/old_torch.py",
        "tests/with_torch_xla",
        "benchmarks/environments.py",
    ),
    "notebook both_at_once": ("examples/notebooks/both_at_once.ipynb", "jax_bridge"),
    "notebook domain": ("examples/notebooks/domain.ipynb", *_DOMAIN),
    "notebook first_steps_in_jax": ("examples/notebooks/first_steps_in_jax.ipynb", "jax_bridge"),
    "notebook first_steps_in_pytorch": ("examples/notebooks/first_steps_in_pytorch.ipynb",),
    "notebook from_torch_xla": ("examples/notebooks/from_torch_xla.ipynb", *_XLA),
    "notebook onnx": ("examples/notebooks/onnx.ipynb", "core/nn", "onnx_bridge"),
    "notebook planning": ("examples/notebooks/planning.ipynb", "core/planner", "core/repeats"),
}
"""Step -> folders and files."""


def state(step: str, root: Path = sources.ROOT) -> str:
    """A digest of the versions and of all that a step's rooms hold."""
    folders = [room for room in ROOMS[step] if (root / room).is_dir()]
    files = [room for room in ROOMS[step] if room not in folders]
    if missing := [name for name in files if not (root / name).is_file()]:
        raise FileNotFoundError(
            f"{missing[0]}, a room of {step}, is not there: mend tools/tiers/rooms.py"
        )
    versions = " ".join(map(" ".join, sorted(record.versions().items())))
    return f"{sources.digest([*sources.python_files(folders, root), *files], root)} {versions}"


def unchanged(step: str, kept: Path = KEPT, root: Path = sources.ROOT) -> bool:
    """Whether a step passed with its rooms as they are."""
    return _read(kept).get(step) == state(step, root)


def note(step: str, kept: Path = KEPT, root: Path = sources.ROOT) -> None:
    """Enter that a step passed."""
    known = {**_read(kept), step: state(step, root)}
    kept.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


def _read(kept: Path) -> dict[str, str]:
    return json.loads(kept.read_text()) if kept.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer for one step."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tiers.rooms", description="Whether the rooms of a step changed."
    )
    parser.add_argument("step", choices=sorted(ROOMS))
    parser.add_argument("--note", action="store_true", help="it has just passed")
    given = parser.parse_args(arguments)
    if given.note:
        note(given.step)
        return 0
    same = unchanged(given.step)
    rooms = ", ".join(ROOMS[given.step])
    if same:
        print(f"{given.step}: passed with {rooms} as they are; make test-all runs it again")
    else:
        print(f"{given.step}: runs, as one of {rooms} has changed since it was noted to pass")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
