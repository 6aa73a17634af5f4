"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_code_that_names_a_page_names_one_that_exists() -> None:
    for source in (ROOT / "omni_proxy").rglob("*.py"):
        for name in re.findall(r"docs/[a-z-]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{source.name} names {name}"
