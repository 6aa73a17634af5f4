"""The documents build into a site without a warning, and what is wrong in them is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mkdocs") is None, reason="mkdocs is not installed: pip install '.[docs]'"),
]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("PYTHONPATH", None)
    command = ["mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").exists(), page.name
    assert "class Core" in (tmp_path / "repository/omni_proxy/core.py.html").read_text(encoding="utf-8").replace(
        '<span class="k">class</span><span class="w"> </span><span class="nc">Core</span>', "class Core"
    )
    for html in tmp_path.glob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert 'src="http' not in text, f"{html.name} loads from elsewhere"
        assert 'rel="stylesheet" href="http' not in text, f"{html.name} loads from elsewhere"


@pytest.mark.parametrize("fault", ["[x](nowhere.md)", "[x](concepts.md#nowhere)", "[x](../nowhere.py)"])
def test_a_link_that_leads_nowhere_is_a_fault(fault: str, tmp_path: Path) -> None:
    for name in ("mkdocs.yml", *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "scripts", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("omni_proxy", "configs", "tests", "kernels", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "faq.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{fault}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    (warning,) = (line for line in done.stderr.splitlines() if line.startswith("WARNING"))
    assert "nowhere" in warning
