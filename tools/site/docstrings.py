"""Docstrings, in Google's style, as Markdown with Sphinx's field lists.

>>> with_fences("Of one:\\n\\n>>> f(1)\\n2").splitlines()
['Of one:', '', '```pycon', '>>> f(1)', '2', '```']
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import griffe

_PROMPT = ">>> "
_FENCES = ("```", "~~~")
_Kind = griffe.DocstringSectionKind


def as_markdown(docstring: griffe.Docstring | None) -> str:
    """The text, its examples in fences, its arguments, results and errors as fields.

    Raises:
        ValueError: there is a section of a kind that this does not write.
    """
    if docstring is None:
        return ""
    sections = docstring.parse(
        "google", returns_multiple_items=False, returns_named_value=False, warn_missing_types=False
    )
    return "\n\n".join(part for section in sections for part in _written(section))


def with_fences(text: str) -> str:
    """Text with a fence around each example, which ends as for doctest: at a blank line."""
    written: list[str] = []
    fence = indent = ""
    example = False
    for line in text.splitlines():
        words = line.lstrip()
        if example and not words:
            written.append(f"{indent}```")
            example = False
        elif not example and not fence and words.startswith(_PROMPT):
            indent = line[: len(line) - len(words)]
            written.append(f"{indent}```pycon")
            example = True
        elif not example and words.startswith(_FENCES):
            fence = "" if fence and words.startswith(fence) else fence or words[:3]
        written.append(line)
    return "\n".join([*written, f"{indent}```"] if example else written)


def _written(section: griffe.DocstringSection) -> Iterator[str]:
    kind, value = section.kind, section.value
    if kind is _Kind.text:
        yield with_fences(value)
    elif kind is _Kind.admonition:
        yield f"**{section.title or value.kind}**\n\n{with_fences(value.contents)}"
    elif kind in _FIELDS:
        yield "\n".join(_field(_FIELDS[kind](item), item.description) for item in value)
    else:
        raise ValueError(f"a docstring has a section of kind {kind.value}: {section}")


_FIELDS: dict[griffe.DocstringSectionKind, Callable[[object], str]] = {
    _Kind.parameters: lambda item: "param " + item.name.replace("*", "\\*"),
    _Kind.other_parameters: lambda item: "param " + item.name.replace("*", "\\*"),
    _Kind.attributes: lambda item: f"ivar {item.name}",
    _Kind.returns: lambda _: "returns",
    _Kind.yields: lambda _: "yields",
    _Kind.raises: lambda item: f"raises {item.annotation}",
    _Kind.warns: lambda item: f"raises {item.annotation}",
}


def _field(name: str, text: str) -> str:
    return f":{name}: {textwrap.indent(with_fences(text), '    ').lstrip()}"
