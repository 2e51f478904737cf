"""The results on the terminal, and those of a GPU in the docs.

Each page in `PAGES` has a block between two markers. `write_docs` replaces it with the figures of
the committed results, or with a sentence that there are none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.harness import results as files
from tools.harness import tables

from .sections import MODELS, SECTIONS, ratio

COMMITTED = files.RESULTS / "device_check.json"
PAGES = ("docs/benchmarks.md", "README.md")
BEGIN, END = "<!-- figures of a GPU -->", "<!-- end of figures of a GPU -->"
NO_FIGURES = {
    "docs/benchmarks.md": "No figures of a GPU are committed yet.",
    "README.md": (
        "No figures of a GPU are committed yet; `python -m tools.device_check` measures there, in "
        "eight minutes ([how](docs/benchmarks.md#on-a-gpu))."
    ),
}
TITLES = {
    "mlp": "MLP, 403M parameters",
    "vit": "ViT-B/16",
    "gpt2": "GPT-2 124M",
    "llama": "Llama 3.2 1B, 8 of 16 layers",
}
CONTESTANTS = {
    "jax": "hand-written JAX",
    "isoshard": "isoshard, `xs.compile`",
    "torch": "torch eager",
    "torch.compile": "`torch.compile`",
}


def show(document: Mapping[str, Any]) -> None:
    """Print a table with a line for each section, then all failures.

    Args:
        document: of a run, see `running`.
    """
    rows = (([name, section["status"]], section) for name, section in document["sections"].items())
    title = (
        f"isoshard {document['versions']['isoshard']} on {document['device']['kind']}, "
        f"{document['seconds']:.0f} s"
    )
    columns = {"": "{summary}", "seconds": "{seconds:.0f}"}
    tables.show(tables.table(title, columns, rows, keys=("section", "status")))
    for name, section in document["sections"].items():
        for failure in section["failures"]:
            print(f"{name}: {failure}")
    for line in peer_failures(document):
        print(line)


def peer_failures(document: Mapping[str, Any]) -> list[str]:
    """Describe the failures of optional parts, one line each.

    Args:
        document: of a run.
    """
    lines = []
    for name, section in document["sections"].items():
        for part in SECTIONS[name].optional:
            record = section["parts"][part]
            failed = {"": record, **record["results"].get("models", {})}
            lines += [
                f"{name}: {part} {model} failed, which does not count: {result['error']['type']}: "
                f"{result['error']['message'].partition(chr(10))[0]}"
                for model, result in failed.items()
                if "error" in result
            ]
    return lines


def write_docs(path: Path) -> list[Path]:
    """Commit the results of a GPU to the repository, and write their figures into the docs.

    Args:
        path: of a document that the check wrote.

    Returns:
        The files that were written.

    Raises:
        ValueError: the results are those of a CPU.
        LookupError: a page lacks the markers.
    """
    document = json.loads(path.read_text())
    if document["device"]["platform"] == "cpu":
        raise ValueError(
            f"{path} has results of a CPU, at sizes that only test the check; the docs show those "
            "of a GPU. Run python -m tools.device_check on a GPU and pass the file that it writes"
        )
    pages = [replace_block(files.ROOT / page, block(page, document)) for page in PAGES]
    return [files.write(COMMITTED, document, indent=1), *pages]


def committed() -> dict[str, Any] | None:
    """The committed results; None if there are none."""
    return json.loads(COMMITTED.read_text()) if COMMITTED.exists() else None


def replace_block(path: Path, text: str) -> Path:
    """Replace the text between the markers of a page.

    Args:
        path: of the page.
        text: in Markdown.

    Returns:
        The path.

    Raises:
        LookupError: the page does not have each marker once, in order.
    """
    before, begin, rest = path.read_text().partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not begin or not end or BEGIN in rest or END in after:
        raise LookupError(f"{path}: expected one line {BEGIN} and after it one line {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return path


def block(page: str, document: Mapping[str, Any] | None) -> str:
    """The text between the markers of a page.

    Args:
        page: one of `PAGES`.
        document: the committed results; None if there are none.
    """
    if document is None:
        return NO_FIGURES[page]
    sections = document["sections"]
    parts = sections.get("training", {}).get("parts", {})
    training = {part: record["results"] for part, record in parts.items()}
    if page == "README.md":
        ratios = [(TITLES[model], ratio(training, "isoshard", model)) for model in MODELS]
        text = ", ".join(f"{title} {value:.2f}" for title, value in ratios if value)
        return (
            f"On one {document['device']['kind']}, the step time in bfloat16 as a ratio to "
            f"hand-written JAX is:\n{text} ([details](docs/benchmarks.md#on-a-gpu))."
        )
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    intro = (
        f"On one {document['device']['kind']}, {document['date'][:10]}, with {versions}, driver "
        f"{document['device']['driver']}: `{document['command']}`."
    )
    summaries = [f"- `{name}`: {section['summary']}" for name, section in sections.items()]
    return "\n\n".join([intro, training_table(training), "\n".join(summaries)])


def training_table(training: Mapping[str, Any]) -> str:
    """The table of training steps, in Markdown.

    Args:
        training: results of the section "training", by part.
    """
    rows = []
    for model, title in TITLES.items():
        for part, contestant in CONTESTANTS.items():
            result = training.get(part, {}).get("models", {}).get(model, {})
            if "median_ms" not in result:
                continue
            memory = result["peak_bytes"] or result["program_bytes"]
            to_jax = ratio(training, part, model)
            cells = [
                f"{result['median_ms']:.2f} ms",
                f"{to_jax:.2f}" if to_jax else "",
                f"{result['mfu']:.0%}" if result["mfu"] else "",
                f"{memory / 2**30:.1f} GiB" if memory else "",
            ]
            rows.append([f"{title}, {contestant}", *cells])
    titles = ["training step in bfloat16", "median", "to JAX", "MFU", "peak memory"]
    return tables.markdown(titles, rows)
