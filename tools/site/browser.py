"""`python -m tools.site.browser`: the built site in headless Chromium, opened as files.

There is no server and no network. Searches have to find what they should, no script may fail, and
pictures of pages go to build/site-pictures. The browser is Debian's `chromium`, or what the
variable CHROMIUM names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .repository_links import ROOT

SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "site-pictures"
SEARCHES = {
    "reshard": "reference/isoshard.html#isoshard.reshard",
    "pinned_host": "meshes.html",
    "ring attention": "domain.html",
    "UnevenError": "troubleshooting.html",
}
"""Words -> a page that has to be among what is found."""

SHOWN = {
    "start": ("index.html", 1300),
    "start_on_a_phone": ("index.html", 500),
    "tutorial": ("tutorials/first_steps_in_pytorch.html", 1300),
    "reference": ("reference/isoshard.html", 1300),
    "troubleshooting": ("troubleshooting.html", 1300),
}
"""Picture -> page, and width of the window in pixels."""

_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000"),
)
_SECONDS = 120
_RESULT = re.compile(r'<li class="kind-\w+"><a href="(?P<page>[^"]+)"')
_FAILED_SCRIPT = re.compile(r'CONSOLE.*"Uncaught .*')


class BrowserError(RuntimeError):
    """The browser is not there, or a page is not as it should be in it."""


def opened(address: str, *options: str) -> str:
    """What Chromium prints for a page.

    Args:
        address: of the page.
        *options: what to do with it, as Chromium takes it.

    Raises:
        BrowserError: Chromium cannot be run, or a script of the page fails.
    """
    browser = os.environ.get("CHROMIUM", "chromium")
    with tempfile.TemporaryDirectory() as profile:
        try:
            done = subprocess.run(
                [browser, *_QUIET, f"--user-data-dir={profile}", *options, address],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except FileNotFoundError:
            raise BrowserError(
                f"there is no {browser}: apt-get install chromium, or set CHROMIUM"
            ) from None
    if done.returncode:
        raise BrowserError(f"{browser} ended with {done.returncode} on {address}:\n{done.stderr}")
    if failed := _FAILED_SCRIPT.findall(done.stderr):
        raise BrowserError(f"{address}: a script failed:\n" + "\n".join(failed))
    return done.stdout


def results_of(words: str, site: Path) -> list[str]:
    """The pages that the site's own search finds, the best first."""
    address = f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}"
    return [match["page"] for match in _RESULT.finditer(opened(address, "--dump-dom"))]


def main() -> int:
    """Search, and take pictures."""
    if not (SITE / "index.html").is_file():
        raise BrowserError(f"there is no site at {SITE}: make docs")
    for words, page in SEARCHES.items():
        results = results_of(words, SITE)
        if not any(result == page or result.startswith(f"{page}#") for result in results):
            raise BrowserError(f"the search for {words!r} finds {results}, and not {page}")
        print(f"searched {words!r}: {len(results)} pages, {page} among them")
    if nothing := results_of("xyzzyx", SITE):
        raise BrowserError(f"the search for 'xyzzyx' finds {nothing}")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (page, width) in SHOWN.items():
        picture = PICTURES / f"{name}.png"
        opened((SITE / page).as_uri(), f"--screenshot={picture}", f"--window-size={width},1400")
        print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrowserError as error:
        sys.exit(str(error))
