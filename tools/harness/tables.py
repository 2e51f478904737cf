"""Rows of figures as tables, on the terminal and in Markdown.

A column is a title and a format of what the row holds; a row that holds it not has an empty cell.

>>> rows = {"ours": {"median_ms": 2.5, "of": {"memory": 3}}, "theirs": {"median_ms": 5.0}}
>>> cells({"median": "{median_ms:.1f} ms", "memory": "{of[memory]} MiB"}, rows["ours"])
['2.5 ms', '3 MiB']
>>> cells({"memory": "{of[memory]} MiB"}, rows["theirs"])
['']
>>> print(markdown(["who", "how fast"], [["`ours`", "2.5"]]))
| who | how fast |
|---|---|
| `ours` | 2.5 |
>>> print(in_markdown(by_name("who", {"ms": "{median_ms:.1f}", "of": "{of[memory]}"}, rows)))
| who | ms | of |
|---|---|---|
| ours | 2.5 | 3 |
| theirs | 5.0 |  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 140
TIMES = {"median": "{median_ms:.2f} ms", "best": "{best_ms:.2f} ms", "ratio": "{ratio:.3f}"}
"""Columns of what `timing.summary` gives."""


def table(
    title: str,
    columns: Mapping[str, str],
    rows: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
    keys: Sequence[str] = ("",),
) -> Table:
    """A table for the terminal, its figures to the right.

    Args:
        title: above it.
        columns: title -> format of a row's figure.
        rows: the names of each row, and what it holds.
        keys: titles of the columns of names.
    """
    shown = Table(title=title)
    for key in keys:
        shown.add_column(key, no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right" if column else "left")
    for names, row in rows:
        shown.add_row(*names, *cells(columns, row))
    return shown


def by_name(
    title: str, columns: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]
) -> Table:
    """A table of one row per name."""
    return table(title, columns, (([name], row) for name, row in results.items()))


def by_pair(
    title: str,
    keys: Sequence[str],
    columns: Mapping[str, str],
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> Table:
    """A table of one row per name, and name within it."""
    pairs = (([name, of], row) for name, rows in results.items() for of, row in rows.items())
    return table(title, columns, pairs, keys)


def cells(columns: Mapping[str, str], row: Mapping[str, Any]) -> list[str]:
    """A row's figures, each by its format; empty where it holds none."""
    return [_cell(form, row) for form in columns.values()]


def _cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except KeyError:
        return ""


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """A table in Markdown.

    Args:
        titles: of the columns.
        rows: their cells.
        right: all columns but the first stand to the right.
    """
    rule = ["---", *(["---:" if right else "---"] * (len(titles) - 1))]
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def in_markdown(table: Table) -> str:
    """A table for the terminal in Markdown: its title stands over the names, empty columns go.

    Args:
        table: with a title.
    """
    columns = [(str(column.header), list(column.cells)) for column in table.columns]
    shown = [
        (str(table.title), columns[0][1]),
        *(column for column in columns[1:] if any(column[1])),
    ]
    return markdown([title for title, _ in shown], zip(*(cells for _, cells in shown), strict=True))


def documented(table: Callable[[Any], Table]) -> Callable[[Any], str]:
    """What makes the table of a page in the docs.

    Args:
        table: makes that for the terminal, of the results.
    """
    return lambda results: in_markdown(table(results))


def show(*shown: Any) -> None:
    """Print tables and lines, as wide as they need."""
    Console(width=WIDTH).print(*shown, sep="\n")
