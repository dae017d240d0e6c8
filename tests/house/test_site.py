"""The built documentation in a headless Chromium: nothing is wider than the screen, or white on a dark page.

`make docs-test` runs it, and the second row does where the extras `docs` and `lab` are installed.
"""

import functools
import http.server
import io
import re
import subprocess
import sys
import threading

import lab
import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow
PAGES = re.findall(r"(\S+)\.md\b", (lab.ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
PHONE, DESKTOP = 390, 1280
BOX = 24  # pixels; no letter and no line is as large

# What is cut at the right edge of the screen, and no box around it scrolls. A table of two columns should not scroll,
# nor one of three of which two have code: there the last column says what to do. Printed columns are not folded.
WIDE = """
() => [
  ...[...document.querySelectorAll('.md-content *')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e))
    .map(e => e.tagName + ' ' + e.innerText?.slice(0, 60)),
  ...[...document.querySelectorAll('.md-typeset__scrollwrap')]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && !e.querySelector('tr > :nth-child(4), th code') && (
      !e.querySelector('tr > :nth-child(3)') || [2, 3].every(i => e.querySelector(`td:nth-child(${i}) code`))))
    .map(e => 'TABLE ' + e.innerText.slice(0, 60)),
  ...[...document.querySelectorAll('.md-content .language-text code')]
    .filter(e => (e.textContent.match(/^.*\\S {3,}\\S+( \\S+)* {3,}\\S/gm) || []).length >= 3)
    .filter(e => e.clientHeight > (e.textContent.split('\\n').length + 2) * parseFloat(getComputedStyle(e).lineHeight))
    .map(e => 'FOLDED ' + e.textContent.slice(0, 60)),
]
"""
SCROLLS = """
window.scrolls = e => {
  for (let up = e; up && !up.matches('.md-content'); up = up.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(up).overflowX)) return true
  return false
}
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    lab.needs("mkdocs", "material", "mkdocstrings", extras="docs,lab")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    subprocess.run(command, cwd=lab.ROOT, check=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(address):
    with lab.browser() as page:
        yield page.context.browser


def shown(browser, address, name, width, scheme):
    """The page `name` of the documentation in a window of this width, for a reader who has seen no page before."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.add_init_script(SCROLLS)
    path = re.sub(r"(^|/)index$", r"\1", name)
    page.goto(address + path + ("/" if path and not path.endswith("/") else ""))
    return page


def white_boxes(page):
    """How many squares of the page are white."""
    picture = np.asarray(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("L"))
    rows, columns = (size // BOX for size in picture.shape)
    squares = picture[: rows * BOX, : columns * BOX].reshape(rows, BOX, columns, BOX)
    return int((squares.min(axis=(1, 3)) > 200).sum())


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen(name, browser, address):
    for width in (PHONE, DESKTOP):
        with shown(browser, address, name, width, "light") as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(WIDE) == []


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("reference/")])
def test_nothing_is_white_on_a_dark_page(name, browser, address):
    with shown(browser, address, name, DESKTOP, "dark") as page:
        assert white_boxes(page) == 0


def test_a_wide_paragraph_and_a_white_picture_would_be_found(browser, address):
    with shown(browser, address, "index", PHONE, "dark") as page:
        page.evaluate("document.querySelector('.md-content p').style.width = '500px'")
        assert page.evaluate(WIDE) != []
        page.add_style_tag(content=".md-typeset img { filter: none !important; mix-blend-mode: normal !important }")
        assert white_boxes(page) > 0
