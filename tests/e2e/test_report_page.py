"""The page of a report in a real browser: all is seen, at any width, and the network is asked nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.report.digest import digest
from fsdp_ckpt.report.page import to_html
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.storage.local import LocalStore
from tests.told_runs import tell_run

pytestmark = pytest.mark.few_ranks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = {"desktop": 1280, "phone": 390}
# Shows the page at each width, and writes down what is to be seen there. The page itself has no script.
HARNESS = """<!doctype html><meta charset="utf-8"><body>FRAMES<pre id="seen"></pre><script>
addEventListener("load", () => {
  const seen = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow;
    const shown = [...page.querySelectorAll("h1,h2,.tile,section,svg,table,summary")]
        .filter(e => e.checkVisibility()).map(e => {
      const box = e.getBoundingClientRect();
      const inScroll = e.closest(".scroll") !== null;
      return {name: e.tagName.toLowerCase(), left: box.left, right: box.right, height: box.height,
              width: box.width, inScroll, narrow: e.closest(".narrow") !== null};
    });
    seen[frame.id] = {
      shown,
      scrollWidth: page.documentElement.scrollWidth,
      innerWidth: view.innerWidth,
      requests: view.performance.getEntriesByType("resource").map(r => r.name),
      text: page.body.innerText.length,
      small: Math.min(...[...page.querySelectorAll("svg text")]
        .filter(t => t.checkVisibility()).map(t => t.getBoundingClientRect().height)),
    };
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>"""


def browse(page: Path, profile: Path) -> tuple[str, str]:
    """Return the page as it stands when all is loaded, and what the browser said."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", "--enable-logging=stderr", "--log-level=0"),
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a browser shows of a report, by width, and what it said: one start for all tests."""
    if CHROMIUM is None:
        pytest.skip("no chromium here; apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    root = LocalStore(str(folder / "run"))
    tell_run(root, 20)
    page = html.escape(to_html(digest(read_telemetry(root))))
    frames = "".join(
        f'<iframe id="{name}" style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>'
        for name, width in WIDTHS.items()
    )
    harness = folder / "harness.html"
    harness.write_text(HARNESS.replace("FRAMES", frames))
    shown, said = browse(harness, folder / "profile")
    match = re.search(r'<pre id="seen">(.*?)</pre>', shown, re.DOTALL)
    assert match is not None, said
    return json.loads(html.unescape(match[1])), said


@pytest.mark.parametrize("name", WIDTHS)
def test_everything_is_within_the_page(seen: tuple[dict[str, Any], str], name: str) -> None:
    """Nothing sticks out, at either width; tables may scroll in their own frames."""
    page = seen[0][name]
    assert page["innerWidth"] == WIDTHS[name]
    assert page["scrollWidth"] <= page["innerWidth"]
    for element in page["shown"]:
        if not element["inScroll"]:
            assert element["left"] >= 0, element
            assert element["right"] <= page["innerWidth"] + 0.5, element


@pytest.mark.parametrize("name", WIDTHS)
def test_pictures_and_tables_are_visible(seen: tuple[dict[str, Any], str], name: str) -> None:
    """Five pictures of the run and the two open timelines, as drawn for this width, in letters of a size."""
    page = seen[0][name]
    pictures = [e for e in page["shown"] if e["name"] == "svg"]
    assert len(pictures) == 7
    assert {e["narrow"] for e in pictures} == {name == "phone"}
    assert all(e["height"] > 60 and e["width"] > 200 for e in pictures)
    tables = [e for e in page["shown"] if e["name"] == "table"]
    assert len(tables) == 3
    assert all(e["height"] > 50 for e in tables)
    assert sum(e["name"] == "h1" for e in page["shown"]) == 1
    assert page["small"] >= 9.0
    assert page["text"] > 1000


def test_nothing_is_asked_of_the_network(seen: tuple[dict[str, Any], str]) -> None:
    """No request, and no error in the console: the page's own policy would make one of a request."""
    shown, said = seen
    assert [page["requests"] for page in shown.values()] == [[], []]
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []
