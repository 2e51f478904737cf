"""The documentation site, `make docs`: the pages of docs/, and those that nobody writes.

`writing` puts Markdown into a folder, which Sphinx reads: the pages of docs/, the notebooks with
the outputs that they keep (`notebook_pages`), the reference of every public name (`public_names`,
`reference_pages`, `docstrings`), and the files of this repository that pages link to
(`repository_links`). docs/index.md says what stands in which section (`navigation`).
"""
