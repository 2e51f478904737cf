"""How many files of isoshard a call passes through: `python -m tools.hops`.

Of each call: the files, the calls of our functions, and how often one file hands over to another;
`-v` names the files. Each call is measured when one of its kind has been done before: the program
of `xs.sync()` is known, `step` is captured, and the verbs of `iso` have met another object.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from isoshard.core.installation import ANNEXES, HEART

ROOT = Path(__file__).resolve().parents[1]
HOUSES = tuple(f"{ROOT / house}/" for house in (*HEART, *ANNEXES, "src"))


@dataclasses.dataclass
class Passed:
    """What a call passed through.

    Attributes:
        files: our files, in the order of their first use.
        calls: of our functions.
        changes: how often a call went from one of our files to another.
    """

    files: list[str]
    calls: int
    changes: int


def passed(function: Callable[[], Any]) -> Passed:
    """Run a function, and note the files of ours that it passes through."""
    record = Passed([], 0, 0)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(HOUSES):
            return
        if name not in record.files:
            record.files.append(name)
        record.calls += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(HOUSES):
            caller = caller.f_back
        record.changes += caller is not None and caller.f_code.co_filename != name

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    record.files = [name.removeprefix(f"{ROOT}/") for name in record.files]
    return record


def measured() -> dict[str, Passed]:
    """The calls that the page on architecture tells of."""
    import jax
    import torch

    import isoshard as iso
    import isoshard.torch_bridge as xs

    mesh = iso.make_mesh((2, 4), ("x", "y"))
    plan = iso.Plan({"*.weight": iso.P("x", None), "*": iso.P()})

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def sharded() -> torch.nn.Module:
        return iso.shard(model(), mesh, plan)

    x, y = torch.ones(4, device="jax"), torch.ones(4, device="jax")
    for _ in range(3):  # the operands are made in the first; the second is what the third repeats
        (x + y).tolist()
    results = {"x + y": passed(lambda: x + y)}
    pending = x + y
    results["xs.sync()"] = passed(pending.tolist)
    step = xs.compile(lambda a: a * 2)
    step(x), step(x)
    results["step(x)"] = passed(lambda: step(x))
    sharded()
    fresh = model()
    results["iso.shard(module)"] = passed(lambda: iso.shard(fresh, mesh, plan))
    tensor = iso.shard(torch.ones(8), mesh, iso.P("x"))
    iso.to_jax(tensor)
    results["iso.to_jax(t)"] = passed(lambda: iso.to_jax(tensor))
    with tempfile.TemporaryDirectory() as folder:
        iso.save(f"{folder}/a", {"model": sharded()})
        saved = sharded()
        results["iso.save(module)"] = passed(lambda: iso.save(f"{folder}/b", {"model": saved}))
    machine = iso.planner.topology("v5e:2x4").mesh((2, 4), ("x", "y"))
    rules = iso.Plan({"up": (None, "y"), "down": ("y", None)}, inputs=("x",))
    arrays = [jax.ShapeDtypeStruct((8, 8), "float32")] * 3

    def products(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x @ up @ down

    def estimate() -> None:
        iso.planner.estimate(products, arrays, machine, rules, batch=("x",))

    estimate()
    results["iso.planner.estimate(f)"] = passed(estimate)
    return results


def files() -> dict[str, list[str]]:
    """The files of each call, in a process that has done nothing before."""
    import isoshard as iso

    iso.simulate_devices(8)
    return {name: record.files for name, record in measured().items()}


def main() -> int:
    """Print the table; with `-v` the files, too."""
    import isoshard as iso

    iso.simulate_devices(8)
    results = measured()
    print("| call | files | calls | changes of file |\n|---|---|---|---|")
    for name, record in results.items():
        print(f"| `{name}` | {len(record.files)} | {record.calls} | {record.changes} |")
    for name, record in results.items():
        if "-v" in sys.argv:
            print(f"\n{name}", *(f"    {file}" for file in record.files), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
