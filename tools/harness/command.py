"""The command line of a benchmark: how many rounds, tables on the terminal, results in a file.

benchmark = Benchmark("rounding", __doc__, rounds=60, quick=5)
options = benchmark.parse()                     # --rounds 60, or 5 with --quick
benchmark.finish(results, table(results))       # benchmarks/results/rounding.json

A benchmark with tables in the docs gives `docs=("benchmarks.md", markdown)`: whenever results are
saved, these tables are replaced, and `--docs` does that alone, without measuring.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from . import documents, results, tables


class Benchmark:
    """A command that measures.

    Args:
        name: of the file of results in `benchmarks/results/`.
        doc: the module's docstring, whose first line tells what it is about.
        rounds: calls of each contestant that count; None where there is no such option.
        quick: the same with `--quick`, which saves nothing; None where there is no such option.
        docs: a page below `docs/`, and what makes its tables of the results.

    Attributes:
        name: of the file of results.
        options: what the command line said, once it is parsed.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        *,
        rounds: int | None = None,
        quick: int | None = None,
        docs: tuple[str, Callable[[dict[str, Any]], str]] | None = None,
    ):
        """See the class."""
        self.name = name
        self._docs = docs
        self._rounds, self._quick = rounds, quick
        self._parser = argparse.ArgumentParser(
            prog=results.program(),
            description=(doc or "").partition("\n")[0].removeprefix("Benchmark: "),
        )
        self.add = self._parser.add_argument
        if rounds is not None:
            self.add("--rounds", type=int, help=f"timed calls of each contestant ({rounds})")
        if quick is not None:
            self.add("--quick", action="store_true", help="small sizes, few rounds, not saved")
        if docs is not None:
            self.add("--docs", action="store_true", help=f"only write what is saved to {docs[0]}")
        self.options = argparse.Namespace(quick=False)

    def add_workloads(self, names: Collection[str]) -> None:
        """Positional arguments: names of workloads; none for all."""
        self.add("workloads", nargs="*", help=f"of {', '.join(names)}; default: all")
        self._names = names

    def parse(self, arguments: Sequence[str] | None = None) -> Any:
        """Read the command line; `rounds` is a number, `quick` is there. `--docs` ends here."""
        options = self._parser.parse_args(arguments, argparse.Namespace(quick=False, docs=False))
        os.environ.setdefault("ISOSHARD_COMPILATION_CACHE", "0")  # compilations are to be measured
        if options.docs:
            self._document(results.saved(self.name))
            self._parser.exit()
        if self._rounds is not None:
            options.rounds = options.rounds or (self._quick if options.quick else self._rounds)
        if "workloads" in options:
            if unknown := set(options.workloads) - set(self._names):
                names = ", ".join(self._names)
                self._parser.error(f"no workload {', '.join(unknown)}; there are {names}")
            options.workloads = options.workloads or list(self._names)
        self.options = options
        return options

    def finish(self, figures: dict[str, Any], *shown: Any, merge: bool = False) -> None:
        """Print what was found, save it, and put it into the docs; with `--quick` print its tables.

        Args:
            figures: the results.
            shown: tables and lines to print.
            merge: results of an earlier run that are not among these stay.
        """
        if shown:
            tables.show(*shown)
        if not self.options.quick:
            kept = {**(results.saved(self.name) if merge else {}), **figures}
            tables.show(f"wrote {results.save(self.name, kept)}")
            self._document(kept)
        elif self._docs is not None:
            print(self._docs[1](figures))

    def _document(self, kept: dict[str, Any]) -> None:
        if self._docs is not None:
            page, markdown = self._docs
            tables.show(f"wrote {documents.put(page, markdown(kept))}")
