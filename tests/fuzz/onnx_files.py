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
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

BATCH = 250
EXTRA = 1 << 30  # bytes of address space beyond what the libraries take
SECONDS = 20  # for one file
SECRET = b"these bytes are outside of the folder " * 7

_AT, _FAULT = "at ", "fault "


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
    number = first
    while number < first + files and time.monotonic() < until:
        last = min(number + BATCH, first + files)
        number = _batch(seed, number, last, out, faults)
    return faults


def _batch(seed: int, first: int, last: int, out: str, faults: list[str]) -> int:
    """Run a child over some files; the number of the first that it did not come to."""
    words = [
        sys.executable,
        "-m",
        "tests.fuzz.onnx_files",
        "--child",
        f"{seed}",
        f"{first}",
        f"{last}",
    ]
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryFile("w+") as lines, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([*words, out], stdout=lines, stderr=errors, cwd=root, text=True)
        try:
            status = child.wait(timeout=60 + SECONDS * 3 + (last - first) * 0.5)
            ended = f"exit status {status}"
        except subprocess.TimeoutExpired:
            child.kill()
            status, ended = child.wait(), "no end"
        lines.seek(0)
        errors.seek(0)
        said = lines.read().splitlines()
        last_words = errors.read().strip().splitlines()[-1:]
    faults += [line.removeprefix(_FAULT) for line in said if line.startswith(_FAULT)]
    if status == 0:
        return last
    reached = [int(line.removeprefix(_AT)) for line in said if line.startswith(_AT)]
    at = reached[-1] if reached else first
    faults.append(f"{at}: the process ended: {ended} {' '.join(last_words)}")
    return at + 1


def child(seed: int, first: int, last: int, out: str) -> None:
    """Open some files under a limit of memory; prints what is wrong.

    Args:
        seed: see `fuzz`.
        first: number of the first file.
        last: number after the last.
        out: see `fuzz`.
    """
    import isoshard as iso

    from .onnx_mutations import mutate
    from .onnx_seeds import seeds

    iso.simulate_devices(8)
    with tempfile.TemporaryDirectory() as temporary:
        folder = _folder(Path(temporary))
        for model in seeds():
            _open(folder, model.SerializeToString())  # loads everything before the limit
        _limit_memory()
        for number in range(first, last):
            print(f"{_AT}{number}", flush=True)
            rng = random.Random(f"{seed}/{number}")
            model, other = rng.sample(seeds(), 2)
            data = mutate(model, other, rng)
            fault = _fault(folder, data)
            if fault:
                print(f"{_FAULT}{number}: {fault}", flush=True)
                if out:
                    Path(out).mkdir(parents=True, exist_ok=True)
                    Path(out, f"{seed}_{number}.onnx").write_bytes(data)


def _fault(folder: Path, data: bytes) -> str:
    """What is wrong with how a file is met; empty if nothing."""
    import isoshard as iso

    allowed = (iso.onnx.ModelError, iso.ShardingError, iso.DeviceError)
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
    from isoshard.cli.onnx_drawing import draw

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
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--child"]:
        child(int(words[1]), int(words[2]), int(words[3]), words[4])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.onnx_files",
        description="Hostile ONNX files are refused, or read.",
    )
    parser.add_argument("--files", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other files (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first file (0)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--out", default="out/fuzz", help="where files that show a fault are kept")
    given = parser.parse_args(words)
    faults = fuzz(**vars(given))
    print("\n".join(faults) or f"{given.files} files: all were read, or refused with a reason")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
