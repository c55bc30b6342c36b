"""Hooks of the documentation site: pages for the documents in the root of the repository.

CONTRIBUTING.md, SECURITY.md and CHANGELOG.md stay where people look for them. The site shows each
of them as a page, with its links rewritten for the place it has there.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}


def rewrite_links(markdown: str) -> str:
    """Point links that hold in the repository to the pages of the site."""
    markdown = re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
    for source, page in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}", f"]({page}", markdown)
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the repository's root."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of every page."""
    del page, config, files
    return rewrite_links(markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the roles of docstrings, such as ``:class:`Queue```, as plain code."""
    del page, config, files
    return re.sub(r":(?:attr|class|func|meth|mod):(?=<code>)", "", html)
