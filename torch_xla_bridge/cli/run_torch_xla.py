"""`isoshard run-torch-xla`: run a script that was written for torch_xla, unchanged.

    isoshard run-torch-xla train.py --steps 10
    isoshard run-torch-xla -m package.train --steps 10
    CPU_NUM_DEVICES=8 isoshard run-torch-xla train.py       # eight virtual CPU devices

`import torch_xla` in the script, and in what it imports, gives isoshard's modules of that name.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from isoshard.torch_xla_bridge import drop_in

_USAGE = """\
usage: isoshard run-torch-xla script.py [ARGS]
       isoshard run-torch-xla -m module [ARGS]

Run a script of torch_xla's SPMD API on isoshard. CPU_NUM_DEVICES=8 gives eight virtual CPU
devices, as torch_xla reads it. docs/torch_xla.md lists what is offered.
"""


def main(argv: Sequence[str]) -> int:
    """Run the script or module that `argv` names, with the rest of it as `sys.argv`.

    Args:
        argv: the command line after `isoshard run-torch-xla`.

    Returns:
        0; 2 for a wrong command line. A `SystemExit` of the script passes through.
    """
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if args else 2
    as_module = args[0] == "-m"
    rest = args[1:] if as_module else args
    if not rest or (not as_module and args[0].startswith("-")):
        print(f"isoshard run-torch-xla: no script in {args}\n{_USAGE}", end="", file=sys.stderr)
        return 2
    target = rest[0]
    if not as_module and not Path(target).is_file():
        print(f"isoshard run-torch-xla: there is no file {target!r}", file=sys.stderr)
        return 2
    drop_in.install()
    sys.argv = rest
    if as_module:
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    return 0
