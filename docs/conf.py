"""Sphinx settings: the pages are plain Markdown and are read just as well without a site."""

project = "hf_specdec"
author = "The hf_specdec contributors"
copyright = "2026, The hf_specdec contributors"

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "results"]

html_theme = "furo"
html_title = "hf_specdec"
suppress_warnings = ["toc.not_included"]  # the pages link to each other from index.md's table, not from a toctree
