"""The part of `docs/compatibility.md` that is made of the tables of private names.

python docs/compatibility.py            whether the page is as the tables say
python docs/compatibility.py --write    write it
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
BEGIN = "<!-- private names: made by docs/compatibility.py -->"
END = "<!-- end of private names -->"


def section() -> str:
    """What stands between the two marks."""
    from isoshard.core.runtime import _jax_internals
    from isoshard.torch_bridge import _torch_internals
    from isoshard.torch_bridge.generation import _transformers_internals
    from isoshard.torch_bridge.trainers import _lightning_internals

    parts = []
    for title, table in (
        ("torch", _torch_internals),
        ("JAX", _jax_internals),
        ("Lightning", _lightning_internals),
        ("transformers", _transformers_internals),
    ):
        for module in pkgutil.iter_modules(getattr(table, "__path__", ())):
            importlib.import_module(f"{table.__name__}.{module.name}")
        tried = table.NAMES.versions
        parts += [f"### Of {title}, {tried}", _table(table.NAMES, tried)]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with the section as it has to be."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{section()}\n\n{END}{tail}"


def _table(rows: Iterable, tried: str) -> str:
    lines = ["| name | which .. | without it |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: row.path.lower()):
        versions = "" if row.versions == tried else f" ({row.versions})"
        formerly = f", before that `{row.formerly}`" if row.formerly else ""
        lines.append(f"| `{row.path}`{formerly}{versions} | {row.why} | {row.without} |")
    return "\n".join(lines)


def main() -> int:
    """Compare or write; 1 if the page is not as it has to be."""
    text = PAGE.read_text()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(text))
        return 0
    if text != page(text):
        print("the page is not as the tables say: python docs/compatibility.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
