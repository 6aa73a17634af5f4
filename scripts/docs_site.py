"""Hooks of mkdocs: pages link to files of the repository; in the site those are pages, too.

Pages of `docs/` that the navigation does not name come at its end, and names of it without a page are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}
_FENCE = "~" * 12


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fit the navigation to the pages that there are."""
    pages = {path.name for path in Path(config.docs_dir).glob("*.md")}
    nav = _existing(config.nav, pages)
    unnamed = sorted(pages - _named(nav))
    config.nav = [*nav, {"More": unnamed}] if unnamed else nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder of the repository that a page links to, and those that these link to."""
    todo = [target for path in Path(config.docs_dir).glob("*.md") for target in _targets(path)]
    done: set[Path] = set()
    while todo:
        target = todo.pop()
        if target not in done and target.exists():
            done.add(target)
            files.append(File.generated(config, _source_page(target), content=_shown(target)))
            todo.extend(_targets(target) if target.suffix == ".md" else ())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/ into links to those pages."""
    if page.file.src_uri.startswith("repository/"):
        return markdown
    return _redirected(markdown, Path(config.docs_dir), page.file.src_uri)


def _existing(nav: Any, pages: set[str]) -> list[Any]:
    kept: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            inside = _existing(inside, pages) if isinstance(inside, list) else inside
            kept += [{title: inside}] if inside else []
        elif entry in pages:
            kept.append(entry)
    return kept


def _named(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    inside = nav.values() if isinstance(nav, dict) else nav
    return {name for entry in inside for name in _named(entry)}


def _targets(page: Path) -> list[Path]:
    """The files and folders outside of docs/ that a page links to."""
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    found = [Path(os.path.normpath(page.parent / link)) for link in links]
    return [path for path in found if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")]


def _source_page(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    return f"repository/{name.removesuffix('.md')}.md" if target.suffix == ".md" else f"repository/{name}.md"


def _shown(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        held = sorted(
            path.name + "/" * path.is_dir() for path in target.iterdir() if not path.name.startswith(("_", "."))
        )
        return f"# {name}/\n\n" + "\n".join(f"- `{entry}`" for entry in held)
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return _redirected(text, target.parent, _source_page(target))
    return f"# {name}\n\n{_FENCE}{_LANGUAGES.get(target.suffix, 'text')}\n{text}\n{_FENCE}\n"


def _redirected(markdown: str, folder: Path, page: str) -> str:
    """The text of a page that lies in `folder`, to be shown as `page` of the site: its links lead within the site."""

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = Path(os.path.normpath(folder / target))
        if ":" in target or not target or not path.exists():
            return match[0]
        inside = path.is_relative_to(ROOT / "docs")
        there = path.relative_to(ROOT / "docs").as_posix() if inside else _source_page(path)
        return f"]({os.path.relpath(there, os.path.dirname(page) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)
