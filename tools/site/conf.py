"""Sphinx's configuration: https://www.sphinx-doc.org/en/master/usage/configuration.html."""

project = "isoshard"
html_title = "isoshard"
extensions = ["myst_parser", "tools.site.name_links"]
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "search_bar_text": "search, also without a network",
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["from_disk.js"]
html_copy_source = False
html_show_copyright = False
