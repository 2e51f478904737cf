"""A program that differs, as a file that can be pasted and run."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from . import vocabulary

_HEAD = """\
# seed {seed}, program {number}:
{what}
import jax
import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

iso.simulate_devices(8)


{helpers}

def program(device):
{body}
    return {{k: v for k, v in locals().items() if isinstance(v, torch.Tensor)}}


want, got = program("cpu"), program("jax")
for name in want:
    print(name, want[name], got[name], sep="\\n")
"""


def of(fault: Any) -> str:
    """The text of a file that shows a `search.Fault`."""
    what = "\n".join(f"#   {line}" for line in fault.what.splitlines())
    body = textwrap.indent("\n".join(map(_line, fault.program.lines)) or "pass", "    ")
    text = _HEAD.format(
        seed=fault.seed, number=fault.number, what=what, helpers=vocabulary.source(), body=body
    )
    return re.sub(r"\n{3,}", "\n\n\n", text)


def _line(line: Any) -> str:
    if line.raises is None:
        return line.text
    return (
        f"try:\n    {line.text}\nexcept Exception as error:  # {line.raises.__name__} on the CPU\n"
        "    print(device, type(error).__name__, error)"
    )
