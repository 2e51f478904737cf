"""`python -m tools.site`: build the site, in which every warning is an error.

No network is asked, and neither torch nor a device is needed: sources are read, not imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sphinx.cmd.build import build_main

from .repository_links import ROOT
from .writing import DocstringError, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, and have Sphinx make HTML of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="the site")
    out = parser.parse_args(arguments).out
    build = out.parent / f"{out.name}-made"
    try:
        write(build)
    except DocstringError as error:
        print(error, file=sys.stderr)
        return 1
    return html(build, out)


def html(build: Path, out: Path) -> int:
    """Have Sphinx make HTML of pages.

    Args:
        build: the folder in which they lie, in `pages`; Sphinx keeps what it read beside them.
        out: the site.

    Returns:
        0, or another number if there was a warning.
    """
    strictly = ["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet"]
    places = ["-c", str(Path(__file__).parent), "-d", str(build / "doctrees")]
    done = build_main([*strictly, *places, "-b", "html", str(build / "pages"), str(out)])
    if not done:
        print(f"the site: {out / 'index.html'}")
    return done


if __name__ == "__main__":
    sys.exit(main())
