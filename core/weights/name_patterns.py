"""Names with captures: what a rule looks for, and what it makes of it.

A name is a path joined by dots. In a pattern, `{i}` stands for any text without a dot, and
`{path*}` for any number of whole parts of the path, none included:

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

_MOST = 4  # whose ends are tried one after the other; the time grows as the name's length ** this
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
            raise WeightError(f"a pattern of names is a string; given was {self.text!r}")
        names = [name for name, _ in _CAPTURE.findall(self.text)]
        parts = self.text.split(".")
        stars = [bool(_star(part)) for part in parts]
        wrong = ""
        if len(set(names)) < len(names):
            wrong = "a capture is named twice"
        elif re.search(r"[{}*]", _CAPTURE.sub("", self.text)):
            wrong = "it has a brace or star outside of a capture"
        elif any("*" in part and not star for part, star in zip(parts, stars, strict=True)):
            wrong = "a capture with a star stands for whole parts, so it stands between dots"
        elif sum(stars) > 1 and any(a and b for a, b in itertools.pairwise(stars)):
            wrong = "two captures with a star stand side by side"
        elif sum(stars) + sum(n for n in _together(parts) if n > 1) > _MOST:
            wrong = (
                f"more than {_MOST} captures, those with a star and those beside others in one "
                "part, could be told apart in too many ways"
            )
        if wrong:
            raise WeightError(
                f"pattern {self.text!r}: {wrong}. Write {{i}} for text without a dot and "
                "{path*} for any number of parts."
            )

    @property
    def captures(self) -> frozenset[str]:
        """The names of its captures."""
        return frozenset(name for name, _ in _CAPTURE.findall(self.text))

    def match(self, name: str) -> dict[str, str] | None:
        """What the captures stand for in `name`, or None if it does not fit."""
        if _star(self.text):  # any name whatever
            return dict.fromkeys(self.captures, name)
        found = _regex(self.text).fullmatch(name)
        return found and {key: value.strip(".") for key, value in found.groupdict().items()}

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name in which the captures stand for `captures`."""
        if _star(self.text):
            return captures[next(iter(self.captures))]
        filled = _CAPTURE.sub(lambda capture: captures[capture[1]], self.text)
        return ".".join(part for part in filled.split(".") if part)


def _together(parts: list[str]) -> list[int]:
    """How many captures stand in each part."""
    return [len(_CAPTURE.findall(part)) for part in parts]


def _star(part: str) -> re.Match[str] | None:
    found = _CAPTURE.fullmatch(part)
    return found if found and found[2] else None


@cached(4096)
def _regex(text: str) -> re.Pattern[str]:
    segments: list[str] = []
    dotted = True  # whether the text before brings its dot along
    for part in text.split("."):
        star = _star(part)
        if star:
            whole = r"(?:[^.]+\.)*" if dotted else r"(?:\.[^.]+)*"
            segments.append(f"(?P<{star[1]}>{whole})")
            continue
        segments.append("" if dotted else r"\.")
        at = 0
        for capture in _CAPTURE.finditer(part):
            segments += [re.escape(part[at : capture.start()]), f"(?P<{capture[1]}>[^.]+)"]
            at = capture.end()
        segments.append(re.escape(part[at:]))
        dotted = False
    return re.compile("".join(segments))
