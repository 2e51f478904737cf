"""A Sphinx extension: code in the text of a page that starts with a public name leads to it.

`iso.shard(x)` and `xs.compile` lead to the reference from every page, `shard` does on the page of
its module.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

_SHORT = {"iso": "isoshard", "xs": "isoshard.torch_bridge", "isoshard": "isoshard"}
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def path_of(code: str, module: str = "") -> str:
    """The path of the name that code starts with, if it is one of the package.

    Args:
        code: as written in a page.
        module: whose names the page writes without it.

    Example:
        >>> path_of("iso.shard(x, mesh)"), path_of("halo", "isoshard.domain")
        ('isoshard.shard', 'isoshard.domain.halo')
        >>> path_of("model(x)"), path_of("{1: 2}")
        ('', '')
    """
    match = _NAME.match(code)
    if not match:
        return ""
    head, _, tail = match[0].partition(".")
    if head in _SHORT:
        return f"{_SHORT[head]}.{tail}" if tail else ""
    return f"{module}.{match[0]}" if module else ""


class NameLinks(SphinxPostTransform):
    """Put references around literals."""

    default_priority = 20

    def run(self, **_: Any) -> None:
        """Change the document that is about to be written."""
        page = self.env.docname
        objects = self.env.domains.python_domain.objects
        module = self.env.metadata[page].get("module", "")
        for literal in list(self.document.findall(nodes.literal)):
            entry = objects.get(path_of(literal.astext(), module))
            if entry is None or _leads_already(literal):
                continue
            link = make_refnode(
                self.app.builder, page, entry.docname, entry.node_id, literal.copy()
            )
            link[0].extend(child.deepcopy() for child in literal)
            literal.replace_self(link)


def _leads_already(node: nodes.Element) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, nodes.reference | nodes.title):
            return True
        parent = parent.parent
    return False


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_post_transform(NameLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
