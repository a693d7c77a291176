"""The documents lead somewhere, and say what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ckpt import errors
from fsdp_ckpt.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Every relative link names a file of the repository, and a heading of it where it names one."""
    text = FENCED.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_compile(page: Path) -> None:
    """No block that says it is Python has a syntax error."""
    for language, block in FENCED.findall(page.read_text()):
        if language == "python":
            compile(block, str(page), "exec")


def test_the_readme_is_short() -> None:
    """One sitting."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_linked() -> None:
    """Each page of docs/ can be reached from the README by links."""
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)", page.read_text()):
            ahead.append((page.parent / target).resolve())
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if page not in seen] == []


def test_every_error_has_its_section_and_every_such_section_its_error() -> None:
    """What a traceback points at is there."""
    page = ROOT / "docs/troubleshooting.md"
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, CheckpointError)
        and not kind.__name__.startswith("_")
    ]
    headings = re.findall(r"^## (\w+Error)$", page.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(kind.__name__ for kind in kinds)
    assert {kind.docs().partition("#")[2] for kind in kinds} <= anchors(page)
    assert CheckpointError("x").__notes__ == ["docs: docs/troubleshooting.md#checkpointerror"]


def test_guarantees_name_tests_that_exist() -> None:
    """A promise without its proof is none."""
    text = (ROOT / "docs/guarantees.md").read_text()
    proofs = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(proofs) >= 15
    for file, name in proofs:
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_api_page_is_what_the_docstrings_say() -> None:
    """``python scripts/make_api_page.py`` makes it anew."""
    script = ROOT / "scripts/make_api_page.py"
    subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT, check=True)
