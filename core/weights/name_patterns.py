"""Names with captures: the sources and targets of rules.

A name is a path joined by dots. In a pattern, `{i}` matches any text without a dot, and `{path*}`
any number of segments of the path, none included:

>>> Pattern("h.{i}.{path*}.weight").match("h.3.attn.out.weight")
{'i': '3', 'path': 'attn.out'}
>>> Pattern("{path*}.weight").match("weight")
{'path': ''}
>>> Pattern("blocks_{i}.{path*}.kernel").fill({"i": "3", "path": "attn.out"})
'blocks_3.attn.out.kernel'
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

from isoshard.core.runtime.caches import cached

from .weight_errors import WeightError

_MOST = 4  # captures with several possible ends; a match takes up to len(name) ** this steps
_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A name with captures.

    Attributes:
        text: as written.
    """

    text: str

    def __post_init__(self) -> None:
        """Check the text."""
        if not isinstance(self.text, str):
            raise WeightError(f"a pattern of names must be a string, not {self.text!r}")
        names = [name for name, _ in _CAPTURE.findall(self.text)]
        segments = self.text.split(".")
        stars = [bool(_star(segment)) for segment in segments]
        counts = [len(_CAPTURE.findall(segment)) for segment in segments]
        wrong = ""
        if len(set(names)) < len(names):
            wrong = "a capture is named twice"
        elif re.search(r"[{}*]", _CAPTURE.sub("", self.text)):
            wrong = "it has a brace or star outside of a capture"
        elif any(
            "*" in segment and not star for segment, star in zip(segments, stars, strict=True)
        ):
            wrong = "a capture with a star must be between dots, as it matches segments of the path"
        elif sum(stars) > 1 and any(a and b for a, b in itertools.pairwise(stars)):
            wrong = "two captures with a star are next to each other"
        elif sum(stars) + sum(n for n in counts if n > 1) > _MOST:
            wrong = (
                f"more than {_MOST} captures have a star or share a segment with others, so a "
                "name could match in too many ways"
            )
        if wrong:
            raise WeightError(
                f"pattern {self.text!r}: {wrong}. Write {{i}} for text without a dot and "
                "{path*} for any number of segments."
            )

    @property
    def captures(self) -> frozenset[str]:
        """The names of the captures."""
        return frozenset(name for name, _ in _CAPTURE.findall(self.text))

    def match(self, name: str) -> dict[str, str] | None:
        """The text of each capture in `name`, or None if it does not match."""
        if _star(self.text):  # any name
            return dict.fromkeys(self.captures, name)
        match = _regex(self.text).fullmatch(name)
        return match and {key: value.strip(".") for key, value in match.groupdict().items()}

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name with the captures replaced."""
        if _star(self.text):
            return captures[next(iter(self.captures))]
        filled = _CAPTURE.sub(lambda capture: captures[capture[1]], self.text)
        return ".".join(segment for segment in filled.split(".") if segment)


def _star(segment: str) -> re.Match[str] | None:
    match = _CAPTURE.fullmatch(segment)
    return match if match and match[2] else None


@cached(4096)
def _regex(text: str) -> re.Pattern[str]:
    patterns: list[str] = []
    dotted = True  # whether the pattern so far ends with its dot
    for segment in text.split("."):
        star = _star(segment)
        if star:
            repeated = r"(?:[^.]+\.)*" if dotted else r"(?:\.[^.]+)*"
            patterns.append(f"(?P<{star[1]}>{repeated})")
            continue
        patterns.append("" if dotted else r"\.")
        at = 0
        for capture in _CAPTURE.finditer(segment):
            patterns += [re.escape(segment[at : capture.start()]), f"(?P<{capture[1]}>[^.]+)"]
            at = capture.end()
        patterns.append(re.escape(segment[at:]))
        dotted = False
    return re.compile("".join(patterns))
