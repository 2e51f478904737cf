"""Hostile ONNX files: each is read and checked, or refused with a reason.

`python -m tests.fuzz.onnx_files` makes 2,000 files from a few good ones and opens each in a process
that may have a gigabyte more than an empty one and twenty seconds a file. A fault is any exception
but the errors that the package documents, a process that dies or hangs, memory that runs out, and
bytes of a file outside the model's folder that turn up in the model.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.harness.workers import Lost, answers

BATCH = 250  # files of a process
EXTRA = 1 << 30  # bytes of address space beyond what the libraries take
SECONDS = 20  # for one file
SECRET = b"these bytes are outside of the folder " * 7


def fuzz(
    *, files: int = 2000, seed: int = 1, first: int = 0, minutes: float | None = None, out: str = ""
) -> list[str]:
    """Open hostile files.

    Args:
        files: how many.
        seed: another seed, other files.
        first: number of the first file.
        minutes: stop after so many.
        out: folder where files that show a fault are kept; by default they are not.

    Returns:
        One line per fault.
    """
    until = time.monotonic() + (minutes or 1e9) * 60
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        found = answers(
            [(seed, number) for number in range(first, first + files)],
            start,
            jobs=1,
            limit=60 + 3 * SECONDS,
            each=BATCH,
            options={"folder": _folder(Path(temporary)), "out": out},
        )
        for (_, number), fault in found:
            if isinstance(fault, Lost):
                fault = fault.reason
            if fault:
                faults.append(f"{number}: {fault}")
            if time.monotonic() > until:
                break
    return faults


def start(folder: Path, out: str) -> Callable[[int, int], str]:
    """Prepare a process: what opening files loads, then a limit of memory.

    Args:
        folder: for the model, and what it must not leave.
        out: see `fuzz`.

    Returns:
        A function that makes and opens the file of a seed and a number; it says what is wrong.
    """
    import isoshard as iso

    from .onnx_mutations import mutate
    from .onnx_seeds import seeds

    iso.simulate_devices(8)
    for model in seeds():
        _open(folder, model.SerializeToString())  # loads everything before the limit
    _limit_memory()

    def opened(seed: int, number: int) -> str:
        rng = random.Random(f"{seed}/{number}")
        model, other = rng.sample(seeds(), 2)
        data = mutate(model, other, rng)
        fault = _fault(folder, data)
        if fault and out:
            Path(out).mkdir(parents=True, exist_ok=True)
            Path(out, f"{seed}_{number}.onnx").write_bytes(data)
        return fault

    return opened


def _fault(folder: Path, data: bytes) -> str:
    """What is wrong with how a file is met; empty if nothing."""
    import isoshard as iso

    allowed = (iso.onnx.ModelError, iso.ShardingError, iso.errors.DeviceError)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        read = _open(folder, data)
    except allowed:
        return ""
    except BaseException as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
        return f"{type(error).__name__} at {where}: {str(error)[:200]!r}"
    finally:
        signal.alarm(0)
    return "it holds bytes from outside the folder" if SECRET[:38] in read else ""


def _open(folder: Path, data: bytes) -> bytes:
    """Meet a file as a user would; the bytes of the model as it was loaded."""
    from isoshard import onnx
    from isoshard.onnx_bridge.cli.onnx_drawing import draw

    path = folder / "model.onnx"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = onnx.load(path)
        read = model.SerializeToString()
        if onnx.validate(model) and model.configuration:
            draw(model, model.configuration[0].name)
            str(onnx.layout(model, config=model.configuration[0].name))
            onnx.compile(model, config=model.configuration[0].name)
    return read


def _folder(root: Path) -> Path:
    """A folder for models, with links that lead out of it, beside what must not be read."""
    (root / "secret.bin").write_bytes(SECRET)
    folder = root / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(256))
    (folder / "link").symlink_to(root / "secret.bin")
    (folder / "folder").symlink_to(root)
    return folder


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no answer within {SECONDS} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; exits with 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.onnx_files",
        description="Hostile ONNX files are refused, or read.",
    )
    parser.add_argument("--files", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other files (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first file (0)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--out", default="out/fuzz", help="where files that show a fault are kept")
    given = parser.parse_args(arguments)
    faults = fuzz(**vars(given))
    print("\n".join(faults) or f"{given.files} files: all were read, or refused with a reason")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
