"""Mutants of the package's heart: which of them the tests notice.

A mutant is the package with one small change (`sites.py`); a test that fails kills it. `NUMBER` of
them are drawn with a fixed seed and kept in `mutants.json`. The tests run once with a probe at each
mutant's place, which tells the tests that come by. Then each mutant is given to these until one
fails, or for `MOST_SECONDS`; one that only ranks come by, to the tests that start ranks. What
survives is given to the tests of its folder as well.

The commands are in `__main__.py`.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from isoshard.core.installation import HEART

from .sites import Site, changed, is_program, sites

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("mutants.json")
SEED, NUMBER = 46, 300
MOST_SECONDS = 60
"""Of tests that a mutant is given, as long as they took on the package as it is."""

RANKS = ("tests/multi_process",)
"""For mutants that other processes come by than a test's own."""

TIMEOUT = 120
LIMIT = 15 * MOST_SECONDS
"""Seconds after which a run is ended, and the mutant counts as killed."""
_PROBE = """
import os
file, seen, process = None, set(), 0
def hit(mutant):
    global file, process
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (mutant, test) in seen and process == os.getpid():
        return
    if process != os.getpid():
        process, file = os.getpid(), open(os.environ["PROBE"], "a", buffering=1)
        seen.clear()
    seen.add((mutant, test))
    file.write(f"{mutant}\\t{test}\\n")
"""


def modules(root: Path = ROOT) -> list[str]:
    """The heart's modules, relative to the root."""
    files = [path.relative_to(root) for part in HEART for path in (root / part).rglob("*.py")]
    return sorted(path.as_posix() for path in files)


def drawn(root: Path = ROOT) -> list[dict[str, Any]]:
    """The mutants: at most one of each function, all sites equally likely."""
    sources = {name: (root / name).read_text() for name in modules(root)}
    every = [(name, site) for name, source in sources.items() for site in sites(source)]
    random.Random(SEED).shuffle(every)
    result: dict[tuple[str, str], dict[str, Any]] = {}
    for name, site in every:
        key = name, site.function
        if key not in result and is_program(changed(sources[name], site)):
            fields = {field: getattr(site, field) for field in (*_IDENTITY, "old", "new")}
            result[key] = {"file": name, **fields}
        if len(result) == NUMBER:
            break
    return list(result.values())


_IDENTITY = ("function", "kind", "ordinal")


_PARSING = threading.Lock()
"""Python 3.11's parser raises SystemError where two threads parse at once."""


def site_of(mutant: Mapping[str, Any], source: str) -> Site | None:
    """Where a kept mutant is in its module as it is now; none if its code is gone."""
    with _PARSING:
        places = list(sites(source))
    for site in places:
        if all(getattr(site, name) == mutant[name] for name in _IDENTITY):
            return site if site.old == mutant["old"] else None
    return None


def kept() -> list[dict[str, Any]]:
    """The mutants as they were drawn, with what became of each."""
    return json.loads(KEPT.read_text())


def keep(mutants: Sequence[Mapping[str, Any]]) -> None:
    """Write them, one a line."""
    KEPT.write_text("[\n" + ",\n".join(json.dumps(mutant) for mutant in mutants) + "\n]\n")


def wheel(folder: Path, edits: Iterable[tuple[str, str]] = ()) -> Path:
    """An unpacked wheel of this checkout, with changed modules.

    Args:
        folder: of the wheel; made where it is not there.
        edits: modules of the checkout, and their new sources.
    """
    if not folder.exists():
        # What an earlier build left in build/lib would end up in the wheel.
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder)]
        command = [sys.executable, "-m", "pip", "install", *options, str(ROOT)]
        subprocess.run(command, check=True)
    for name, source in edits:
        (folder / "isoshard" / name).write_text(source)
    return folder


def probed(folder: Path) -> Path:
    """A wheel whose functions write down the tests that come by a mutant's place."""
    by_file = collections.defaultdict(list)
    for number, mutant in enumerate(kept()):
        by_file[mutant["file"]].append((number, mutant))
    edits = []
    for name, mutants in by_file.items():
        source = (ROOT / name).read_text()
        probes = [(number, site_of(mutant, source)) for number, mutant in mutants]
        # From the end: what stands before stays where it is.
        for number, site in sorted(
            ((number, site) for number, site in probes if site), key=lambda pair: -pair[1].start
        ):
            hit = f"__import__('isoshard.core._probe', fromlist='_').hit({number})"
            new = f"{hit}; {site.old}" if site.statement else f"({hit}, {site.old})[1]"
            if site.kind == "keyword":
                key, _, value = site.old.partition("=")
                new = f"{key}=({hit}, {value})[1]"
            source = changed(source, site, new)
        compile(source, name, "exec", dont_inherit=True)
        edits.append((name, source))
    wheel(folder, edits)
    # In the package: captured steps watch what users' functions read, and not isoshard's.
    (folder / "isoshard" / "core" / "_probe.py").write_text(_PROBE)
    return folder


def pytest_on(package: Path, arguments: Sequence[str], **environment: str) -> int:
    """Run pytest of this checkout's tests on an unpacked wheel.

    Returns:
        The exit status.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    path = f"{package / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(package), "PATH": path} | environment
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    (package / "last.txt").write_bytes(done.stdout)
    return done.returncode


def visits(report: Path) -> dict[int, set[str]]:
    """The tests that came by each mutant's place, and the files in whose fixtures it was.

    Outside of a test, as in ranks, it is "".
    """
    tests = collections.defaultdict(set)
    for line in report.read_text().splitlines():
        number, _, current = line.partition("\t")
        test, _, phase = current.rpartition(" (")
        if number.isdigit():
            tests[int(number)].add(test)
            if phase == "setup)":
                tests[int(number)].add(test.partition("::")[0])
    return tests


def chosen(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """The tests for a mutant: `MOST_SECONDS` of them, at least one.

    The shortest case of each test function comes before the second ones, and so on.

    Args:
        tests: that come by.
        seconds: how long each takes.
    """
    result, spent = [], 0.0
    shortest = sorted(tests, key=lambda test: (seconds.get(test, 1.0), test))
    cases: collections.Counter[str] = collections.Counter()
    turns = []
    for test in shortest:
        function = test.partition("[")[0]
        turns.append((cases[function], len(turns), test))
        cases[function] += 1
    for _, _, test in sorted(turns):
        spent += seconds.get(test, 1.0)
        if spent > MOST_SECONDS and result:
            break
        result.append(test)
    return result


def of_files(files: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The tests in some files: a fixture that comes by may be shared by them all."""
    prefixes = tuple(f"{file}::" for file in files if "::" not in file)
    return [test for test in tests if test.startswith(prefixes)]


def of_folder(file: str, tests: Iterable[str]) -> list[str]:
    """The tests in the folder that has the name of a module's, or of one around it.

    Args:
        file: the module's.
        tests: all.
    """
    folder, every, chosen_tests = Path(file).parent, list(tests), list[str]()
    while not chosen_tests and folder.name:
        chosen_tests = [test for test in every if test.startswith(f"tests/{folder}/")]
        folder = folder.parent
    return chosen_tests


class Runs:
    """One run of pytest after the other, each on the unpacked wheel of this checkout.

    Attributes:
        package: the folder of the wheel.
    """

    def __init__(self, package: Path) -> None:
        """Make the wheel, and start the process that forks (`preloaded.py`)."""
        self.package = wheel(package)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tools.suite.preloaded"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pytest(self, arguments: Sequence[str]) -> int:
        """The exit status of a run; minus a signal where one ended it."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {
            "package": str(self.package),
            "arguments": ["-q", "-p", "no:cacheprovider", *arguments],
            "output": str(self.package / "last.txt"),
            "limit": LIMIT,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._server.communicate()


def kill(mutant: Mapping[str, Any], tests: Sequence[str], runs: Runs) -> str:
    """Run tests on a mutant.

    A test that fails among others, and alone does not, or that fails alone on the package as it is,
    kills nothing.

    Returns:
        The test that failed; "" if none did.
    """
    name = mutant["file"]
    source = (ROOT / name).read_text()
    site = site_of(mutant, source)
    left = list(tests)
    while site and left:
        wheel(runs.package, [(name, changed(source, site))])
        killer = failed(left, runs)
        fails_alone = killer in left and failed([killer], runs)
        wheel(runs.package, [(name, source)])
        if killer not in left:  # none, or pytest itself ended
            return killer
        if fails_alone and not failed([killer], runs):
            return killer
        left.remove(killer)
    return ""


def failed(tests: Sequence[str], runs: Runs) -> str:
    """The first test that fails on a package, or how pytest ended; "" for none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as ids:
        ids.write("\n".join(tests))
        ids.flush()
        code = runs.pytest(["-x", "-rfE", f"--timeout={TIMEOUT}", f"@{ids.name}"])
    if code == 0:
        return ""
    log = (runs.package / "last.txt").read_text(errors="replace")
    if code in (4, 5) and "ERROR: not found" in log:  # a test that is not there kills nothing
        raise SystemExit(f"pytest found not all tests: run the probes anew\n{log}")
    lines = [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" ", 1)[1].split(" - ")[0] if lines else f"pytest ended with {code}"


def kill_all(report: Path, costs: Path, column: str, workers: int, scratch: Path) -> None:
    """Give each mutant to its tests, and keep what became of it.

    Args:
        report: of the probes.
        costs: of each test, as `tools.suite.costs` writes them.
        column: of the table, such as "before".
        workers: processes at a time.
        scratch: a folder for their wheels.
    """
    measured = json.loads(costs.read_text())
    seconds = measured["tests"]
    failing = set(measured["failed"])  # on the package as it is: they would kill every mutant
    passing = {*seconds} - failing
    seen = visits(report)
    mutants = kept()
    every = [Runs(scratch / f"wheel{number}") for number in range(workers)]
    free = list(every)

    def try_mutant(number: int) -> None:
        runs = free.pop()
        try:
            came = seen.get(number, set()) - failing
            if site_of(mutants[number], (ROOT / mutants[number]["file"]).read_text()) is None:
                mutants[number][column] = {"gone": True}
                return keep(mutants)
            groups = (
                came & passing,
                of_files(came, passing),
                # What is done at import is seen in the first test of a process alone.
                of_folder(mutants[number]["file"], passing),
            )
            killer, tried = "", set[str]()
            if came == {""}:
                ranks = [test for test in seconds if test in passing and test.startswith(RANKS)]
                killer = kill(mutants[number], ranks, runs)
            for group in groups:
                tests = [] if killer else chosen({*group} - tried, seconds)
                tried.update(tests)
                killer = killer or kill(mutants[number], tests, runs)
            mutants[number][column] = {
                "killed": bool(killer),
                "by": killer,
                "tests": "ranks" if came == {""} else len(tried),
                "visits": sum("::" in test for test in came),
            }
            keep(mutants)
            print(number, mutants[number]["file"], mutants[number][column], flush=True)
        finally:
            free.append(runs)

    left = [number for number, mutant in enumerate(mutants) if column not in mutant]
    alone = [number for number in left if seen.get(number) == {""}]
    with futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(try_mutant, set(left).difference(alone)))
    for number in alone:  # ranks have time limits, and cores to themselves
        try_mutant(number)
    for runs in every:
        runs.end()


def table(mutants: Sequence[Mapping[str, Any]]) -> str:
    """The shares of killed mutants by column, and those that survive in the last, as Markdown.

    Mutants whose code is gone count in no column that was made since.
    """
    columns = [name for name in ("before", "after") if any(name in mutant for mutant in mutants)]
    lines = ["| suite | mutants | visited | killed | share |", "|---|---|---|---|---|"]
    for column in columns:
        tried = [mutant[column] for mutant in mutants if "killed" in mutant.get(column, ())]
        killed = sum(result["killed"] for result in tried)
        visited = sum(result["visits"] > 0 for result in tried)
        share = killed / max(len(tried), 1)
        lines.append(f"| {column} | {len(tried)} | {visited} | {killed} | {share:.1%} |")
    lines += [
        "",
        "| survivor | function | change | in place of | tests that come by |",
        "|" + "---|" * 5,
    ]
    for mutant in mutants:
        result = mutant.get(columns[-1]) if columns else None
        if result and not result.get("killed", True):
            old, new = (" ".join(mutant[name].split())[:60] for name in ("old", "new"))
            cells = (mutant["file"], mutant["function"], f"`{new}`", f"`{old}`", result["visits"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
