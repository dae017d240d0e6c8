"""A JupyterLab of its own with this interpreter as its kernel, and a headless Chromium that looks at it."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 1280

# What the page says about each output, in pixels. A text that is wider than its box is cut or hidden.
LOOK = """
() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].map(output => ({
  kind: output.dataset.mimeType || '',
  text: output.innerText,
  classes: output.className,
  width: output.clientWidth,
  wide: [output, ...output.querySelectorAll('*')]
    .filter(e => !e.closest('svg') && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1
                 && getComputedStyle(e).display !== 'inline')
    .map(e => [e.tagName + '.' + (e.className || ''), e.scrollWidth, e.clientWidth, e.innerText.slice(0, 60)]),
  wrapped: [...output.querySelectorAll('pre')]
    .filter(e => e.clientHeight > (e.textContent.replace(/\\n$/, '').split('\\n').length + 0.9)
                 * parseFloat(getComputedStyle(e).lineHeight))
    .map(e => e.textContent.split('\\n').sort((a, b) => b.length - a.length)[0].slice(0, 200)),
  broken: [...output.querySelectorAll('img')].filter(i => !i.complete || !i.naturalWidth).length,
  pictures: output.querySelectorAll('img, svg').length,
  tables: output.querySelectorAll('table').length,
}))
"""

# What of the sources does not fit: a line of code that has to be scrolled to, a line of a text that is folded.
SOURCES = """
() => [
  ...[...document.querySelectorAll('.jp-CodeCell .cm-scroller')]
    .filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.innerText.split('\\n').sort((a, b) => b.length - a.length)[0]),
  ...[...document.querySelectorAll('.jp-MarkdownOutput pre')]
    .filter(e => e.scrollWidth > e.clientWidth + 1
                 || e.clientHeight > (e.textContent.replace(/\\n$/, '').split('\\n').length + 0.9)
                    * parseFloat(getComputedStyle(e).lineHeight))
    .map(e => e.textContent.split('\\n').sort((a, b) => b.length - a.length)[0]),
  ...[...document.querySelectorAll('.jp-MarkdownOutput')]
    .filter(e => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 200)),
]
"""

# A bar is gone when its epoch is over.
WATCH = """
() => new MutationObserver(() => {
  if (document.querySelector('.jp-OutputArea .widget-hprogress, .jp-OutputArea .jupyter-widget-hprogress'))
    window.sawBar = true
}).observe(document.body, {childList: true, subtree: true})
"""


def needs(*modules, extras="lab"):
    """Skips where there is no browser or one of the modules is not installed."""
    if chromium() is None:
        pytest.skip("there is no Chromium (Debian package chromium)")
    for module in ("playwright", *modules):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (pip install 'jaxpar[{extras}]')")


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for found in map(shutil.which, names) if found), None)


@contextlib.contextmanager
def server(folder):
    """Yields the address of a JupyterLab that shows `folder`, which gets its settings too."""
    home = folder / ".lab"
    kernel = home / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    for plugin, settings in {
        "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is there, not only those in sight
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    }.items():
        file = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "MPLBACKEND")}
    env |= {
        "PYTHONPATH": str(ROOT),
        "JAXPAR_NOTEBOOK_QUICK": "1",
        "JAXPAR_HEARTBEAT_TIMEOUT": "120",  # of the processes in 05, beside a browser
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    command = [sys.executable, "-m", "jupyterlab"]
    command += ["--no-browser", "--allow-root", "--ServerApp.port=0", "--expose-app-in-browser"]
    command += ["--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}"]
    with open(home / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
        try:
            yield _address(process, home)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process, home):
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        for file in (home / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):
                return json.loads(file.read_text())["url"]
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {(home / 'log').read_text()[-2000:]}")


@contextlib.contextmanager
def browser():
    """Yields a page in a Chromium of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # As root Chromium starts only without its sandbox; it sees nothing but the server started here.
        chrome = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = chrome.new_page(viewport={"width": WIDTH, "height": 900})
            page.set_default_timeout(120_000)
            yield page
        finally:
            chrome.close()


CELLS = "jupyterapp.shell.currentWidget.content"
KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"
START = "name => { window.over = false; jupyterapp.commands.execute(name).finally(() => { window.over = true }) }"
BARS = ".widget-hprogress, .jupyter-widget-hprogress"


def open_notebook(page, address, name):
    """A notebook of the folder that is served, its kernel ready, nothing run."""
    page.set_viewport_size({"width": WIDTH, "height": 900})
    page.goto(f"{address}lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
    )
    page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
    page.evaluate(WATCH)


def start(page, command, cell=None):
    """Begins what a menu entry or a key does, at the cell that begins with the text `cell`."""
    if cell is not None:
        page.evaluate(f"index => {{ {CELLS}.deselectAll(); {CELLS}.activeCellIndex = index }}", number_of(page, cell))
    page.evaluate(START, command)


def number_of(page, text):
    """Of the cell that begins with a text."""
    found = page.evaluate(f"text => {CELLS}.widgets.findIndex(c => c.model.sharedModel.source.startsWith(text))", text)
    assert found >= 0, f"no cell begins with {text!r}"
    return found


def wait(page, seconds):
    """Until what was begun is over."""
    page.wait_for_function("window.over", timeout=1000 * seconds)


def run_all(page, address, name, seconds, picture):
    """Opens a notebook, runs all its cells, takes a picture.

    Returns:
        (what the page says about each output, whether a progress bar was seen meanwhile)
    """
    open_notebook(page, address, name)
    start(page, "notebook:run-all-cells")
    wait(page, seconds)
    take(page, picture)
    found = page.evaluate(LOOK), page.evaluate("window.sawBar === true")
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    return found


def no_bar(cell):
    """Waits until the cell shows no bar; what closes one comes a moment later than the end of the cell."""
    cell.locator(BARS).first.wait_for(state="hidden", timeout=10_000)


def take(page, picture):
    """A picture of the whole notebook: the window is made as high as it is."""
    page.set_viewport_size({"width": WIDTH, "height": 900})
    height = page.evaluate(
        "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].reduce((sum, c) => sum + c.offsetHeight + 6, 0)"
    )
    page.set_viewport_size({"width": WIDTH, "height": min(16_000, max(900, height + 200))})
    page.evaluate("document.querySelectorAll('.jp-Notebook, .jp-Notebook *').forEach(e => { e.scrollTop = 0 })")
    page.wait_for_timeout(500)
    page.screenshot(path=picture)


def again(page, seconds):
    """Runs each cell once more, from the last to the first, each as if somebody went back to it.

    Returns:
        what the page says about each output
    """
    page.evaluate(
        """() => {
          const cells = jupyterapp.shell.currentWidget.content
          window.over = false
          const each = async () => {
            for (let index = cells.widgets.length - 1; index >= 0; index--) {
              if (cells.widgets[index].model.type !== 'code') continue
              cells.deselectAll()
              cells.activeCellIndex = index
              await jupyterapp.commands.execute('notebook:run-cell')
            }
          }
          each().finally(() => { window.over = true })
        }"""
    )
    wait(page, seconds)
    return page.evaluate(LOOK)


def close(page):
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")


def complaints(outputs):
    """What a reader of the notebook would stumble over."""
    words = ("Error displaying widget", "Loading widget", "failed to load", "Traceback (most recent call last)")
    found = []
    for output in outputs:
        short = " ".join(output["text"].split())[:200]
        if output["kind"].endswith((".error", ".stderr")):
            found.append(f"{output['kind']}: {short}")
        found += [f"{word!r} in {short!r}" for word in words if word.lower() in output["text"].lower()]
        found += [f"a picture that is not there, in {short!r}"] * output["broken"]
        if output["wide"]:
            found.append(f"wider than its place: {output['wide'][:3]}")
    return found


def cell(page, text):
    """The place on the page of the cell that begins with a text, its output included."""
    return page.locator(".jp-Notebook .jp-Cell").nth(number_of(page, text))


def cut(page):
    """The lines of code and of the texts between that do not fit into a window of 1280 pixels."""
    return page.evaluate(SOURCES)


def folded(outputs):
    """The longest line of each text that does not fit into a window of 1280 pixels and is folded."""
    return [line for output in outputs for line in output["wrapped"]]
