"""What a run came to, by file, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from .outcomes import COUNTED, Outcome

Outcomes = Mapping[str, Mapping[str, Outcome]]
"""By file and case."""

_HEAD = ("file", "cases", *COUNTED)


def table(outcomes: Outcomes) -> str:
    """A line for each file, in Markdown; of what torch skips nothing is counted.

    >>> print(table({"test_a": {"A::test_x": Outcome("pass"), "A::test_y": Outcome("differ")}}))
    | file | cases | pass | values | differ | ranks |
    |---|---|---|---|---|---|
    | `test_a` | 2 | 1 |  | 1 |  |
    """
    lines = [_line(_HEAD), "|" + "---|" * len(_HEAD)]
    for file, cases in outcomes.items():
        all_ = [outcome.status for outcome in cases.values()]
        counts = [all_.count(status) for status in COUNTED]
        lines.append(_line((f"`{file}`", *(str(count or "") for count in (sum(counts), *counts)))))
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def as_json(outcomes: Outcomes) -> dict[str, dict[str, dict[str, object]]]:
    """Status and reasons of every case."""
    return {
        file: {
            case: {"status": outcome.status, "reasons": outcome.reasons()}
            for case, outcome in sorted(cases.items())
        }
        for file, cases in outcomes.items()
    }
