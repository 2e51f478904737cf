"""Programs on disk: exported once, compiled for each target, found again after an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Artifact(NamedTuple):
    """One program for one platform.

    Attributes:
        entry: of the database, or the name of a step.
        columns: of the conformance table whose samples it holds; ("step",) of a step.
        platform: "tpu" or "cuda".
        file: its name in the folder; empty if it could not be lowered.
        reason: why it could not be.
        axes: of its mesh, with their sizes.
        donated: numbers of the inputs whose memory results take.
        wide: 64-bit types are on.
    """

    entry: str
    columns: tuple[str, ...]
    platform: str
    file: str
    reason: str = ""
    axes: tuple[tuple[str, int], ...] = (("x", 1),)
    donated: tuple[int, ...] = ()
    wide: bool = True

    def request(self, folder: Path) -> dict[str, Any]:
        """What `compiling.py` is asked.

        Args:
            folder: where the file is.
        """
        asked = {"axes": self.axes, "donated": self.donated, "wide": self.wide}
        return {"path": str(folder / self.file), **asked}


class Exported(NamedTuple):
    """What came of one task.

    Attributes:
        columns: those that have a sample.
        on_host: of these, the ones with an operator that the host computes.
        artifacts: their programs.
    """

    columns: tuple[str, ...]
    on_host: tuple[str, ...]
    artifacts: tuple[Artifact, ...]

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return self._asdict() | {"artifacts": [one._asdict() for one in self.artifacts]}

    @staticmethod
    def of_json(kept: Mapping[str, Any]) -> Exported:
        """Of what `as_json` gave.

        Args:
            kept: read from JSON.
        """
        artifacts = [Artifact(**_tuples(one)) for one in kept["artifacts"]]
        return Exported(**_tuples({**kept, "artifacts": artifacts}))


def _tuples(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of JSON, and those in them, as the tuples they were."""

    def of(value: Any) -> Any:
        return tuple(map(of, value)) if type(value) is list else value

    return {name: of(value) for name, value in kept.items()}


def keep(folder: Path, program: bytes, platform: str) -> str:
    """Write a program under a name that is its digest; the same program is one file.

    Args:
        folder: for programs.
        program: serialized.
        platform: that it is for.

    Returns:
        The file's name.
    """
    name = f"{hashlib.sha256(program).hexdigest()[:24]}.{platform}"
    if not (folder / name).exists():
        part = folder / f"{name}.part"
        part.write_bytes(program)
        part.rename(folder / name)
    return name


def reason_of(error: BaseException) -> str:
    """An error in one line.

    Args:
        error: that was raised while lowering or compiling.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
