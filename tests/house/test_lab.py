"""Notebooks in a real JupyterLab, looked at by a headless Chromium.

One small notebook with every display is run in the second row, where the extra `lab` is installed; all of
`notebooks/`, run, gone back to, stopped and restarted, by `make lab-test`. The pictures are kept where
JAXPAR_SCREENSHOTS names a folder.
"""

import os
import re
import shutil
from pathlib import Path

import lab
import nbformat
import pytest

NOTEBOOKS = sorted((lab.ROOT / "notebooks").glob("*.ipynb"))
# Seconds for all cells of a notebook, on a machine that has much else to do; an idle one needs one or two minutes.
LONG = 900

CELLS = [
    """
    import jaxpar as jp
    jp.parallel.use_cpu_devices(8)
    import jax, jax.numpy as jnp, numpy as np, optax
    """,
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (512, 28, 28, 1), np.uint8)
    examples = jp.data.Dataset(images, images[:, 14, 14, 0] // 26)
    params = jp.models.lenet.init(jax.random.key(0))
    store = jp.kv.from_params(params, kind="device", optimizer=optax.sgd(0.2))
    store
    """,
    "state = jp.train.create_state(store, 0); state",
    """
    step = jp.train.make_train_step(jp.train.classification_loss(jp.models.lenet.apply))
    options = dict(test_data=examples, apply_fn=jp.models.lenet.apply, batch_size=64)
    state, history = jp.train.fit(state, step, examples, epochs=2, **options)
    """,
    """
    plot = jp.train.LivePlot()
    live = dict(callbacks=plot, on_step=plot.on_step, progress=False)
    state, history = jp.train.fit(state, step, examples, epochs=2, **live, **options)
    """,
    "history",
    "jp.train.plot_history(history)",
    "jp.viz.plot_network(jp.models.lenet.apply, params, jax.ShapeDtypeStruct((64, 28, 28, 1), jnp.float32))",
    "jp.viz.print_summary(jp.models.lenet.apply, params, jax.ShapeDtypeStruct((64, 28, 28, 1), jnp.float32))",
    "jp.train.plot_confusion_matrix(jp.train.confusion_matrix(state, jp.models.lenet.apply, examples))",
    "wrong = jp.train.mistakes(state, jp.models.lenet.apply, examples); wrong",
    "jp.train.plot_mistakes(wrong, examples, class_names=jp.data.FASHION_MNIST_CLASSES)",
    "examples",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lab.needs("jupyterlab", "ipywidgets", "matplotlib")
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def address(folder):
    with lab.server(folder) as found:
        yield found


@pytest.fixture(scope="module")
def page(address):
    with lab.browser() as found:
        yield found


def pictures(folder):
    place = Path(os.environ.get("JAXPAR_SCREENSHOTS", folder))
    place.mkdir(parents=True, exist_ok=True)
    return place


def write(path, *cells):
    """A notebook."""
    cells = [nbformat.v4.new_code_cell("\n".join(line.strip() for line in cell.strip().splitlines())) for cell in cells]
    kernel = {"kernelspec": {"name": "python3", "display_name": "x"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


@pytest.mark.slow
def test_every_display(folder, address, page):
    write(folder / "displays.ipynb", *CELLS)
    outputs, bar = lab.run_all(page, address, "displays.ipynb", LONG, pictures(folder) / "displays.png")
    assert lab.complaints(outputs) == []
    assert lab.folded(outputs) == []
    shown = [(o["kind"], o["pictures"], o["tables"]) for o in outputs]
    assert sum(tables for *_, tables in shown) >= 4, shown
    assert sum(count for _, count, _ in shown) >= 5, shown
    assert bar  # tqdm's, a widget
    lab.close(page)


def wanted(request):
    if "lab" not in request.config.option.markexpr:
        pytest.skip("minutes long; make lab-test, or pytest -m lab")


# What an output shows of a network: its page in a frame, or its picture.
SEEN = """
() => [...document.querySelectorAll('.jp-OutputArea-output')].map(output => ['iframe', 'img'].map(
  name => [...output.querySelectorAll(name)].filter(e => e.clientWidth > 200 && e.clientHeight > 200).length))
"""
DRAW = """
import jax, jax.numpy as jnp, jaxpar as jp
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
jp.viz.plot_network(lambda w, x: jax.nn.relu(jax.nn.relu(x @ w) @ w), x, x)
"""


@pytest.mark.slow
def test_a_trusted_notebook_shows_the_page_of_a_network_and_another_its_picture(folder, address, page):
    write(folder / "network.ipynb", DRAW)
    outputs, _ = lab.run_all(page, address, "network.ipynb", LONG, pictures(folder) / "network.png")
    assert lab.complaints(outputs) == []
    frame = page.frame_locator(".jp-OutputArea-output iframe")
    frame.locator(".box", has_text="FullyConnected").first.click()
    assert "16 parameters" in frame.locator("#panel").inner_text()
    assert page.evaluate(SEEN) == [[1, 0]]
    theme = "apputils:change-theme"
    page.evaluate(f"jupyterapp.commands.execute('{theme}', {{theme: 'JupyterLab Dark'}})")
    frame.locator(":root[data-theme=dark]").wait_for()
    page.evaluate(f"jupyterapp.commands.execute('{theme}', {{theme: 'JupyterLab Light'}})")
    frame.locator(":root[data-theme=light]").wait_for()
    lab.close(page)
    shutil.copy(folder / "network.ipynb", folder / "sent.ipynb")  # a path that the server has not signed
    saved = nbformat.read(folder / "sent.ipynb", as_version=4)
    saved.cells[0].outputs[0].data["text/plain"] += " "
    nbformat.write(saved, folder / "sent.ipynb")
    lab.open_notebook(page, address, "sent.ipynb")
    page.locator(".jp-OutputArea-output img").wait_for()
    assert page.evaluate(SEEN) == [[0, 1]]
    lab.close(page)


@pytest.mark.lab
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, folder, address, page, request):
    wanted(request)
    shutil.copy(path, folder)
    outputs, _ = lab.run_all(page, address, path.name, LONG, pictures(folder) / f"{path.stem}.png")
    assert outputs
    assert lab.complaints(outputs) == []
    assert lab.folded(outputs) == []
    assert lab.cut(page) == []
    # A training that is run again finds its own checkpoints and says so, on standard error.
    outputs = [o for o in lab.again(page, LONG) if not o["text"].startswith("jaxpar: resumed from step ")]
    assert lab.complaints(outputs) == []
    lab.close(page)


# The cell of the notebook that trains with the store, which is to run until somebody stops it.
TRAIN = "state, history = jp.train.fit("
AFTER = "figure, (left, right) = plt.subplots("


@pytest.fixture
def training(folder, address, page, request):
    wanted(request)
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("02")]
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if cell.source.startswith(TRAIN)]
    assert "epochs=EPOCHS" in cell.source
    cell.source = cell.source.replace("epochs=EPOCHS", "epochs=10_000")
    nbformat.write(notebook, folder / "training.ipynb")
    lab.open_notebook(page, address, "training.ipynb")
    lab.start(page, "notebook:run-all-above", TRAIN)
    lab.wait(page, LONG)
    yield lab.cell(page, TRAIN)
    lab.close(page)


def stopped(page, cell, epoch):
    """Runs the training cell and stops it by the button in an epoch; returns the step that it names."""
    lab.start(page, "notebook:run-cell", TRAIN)
    cell.locator(".jp-InputPrompt", has_text="*").wait_for()
    cell.get_by_text(f"epoch {epoch}/", exact=False).first.wait_for(timeout=1000 * LONG)
    cell.locator(lab.BARS).first.wait_for(timeout=1000 * LONG)
    page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    lab.wait(page, 60)
    lab.no_bar(cell)
    text = cell.inner_text()
    assert "Traceback" not in text
    (step,) = re.findall(r"jaxpar: fit: interrupted after step (\d+), in epoch \d+ of \d+; nothing was saved", text)
    return int(step)


@pytest.mark.lab
def test_the_stop_button_ends_training_and_the_cell_runs_again(training, folder, page):
    first = stopped(page, training, 2)
    lab.take(page, pictures(folder) / "stopped.png")
    lab.start(page, "notebook:run-all-below", AFTER)
    lab.wait(page, LONG)
    outputs = [o for o in page.evaluate(lab.LOOK) if "fit: interrupted" not in o["text"]]
    assert lab.complaints(outputs) == []  # the state and the history up to there are good for all that follows
    assert stopped(page, training, 2) > first


@pytest.mark.lab
def test_restarting_the_kernel_begins_anew(training, page):
    page.locator('[data-command="notebook:restart-kernel"]').first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_function(f"{lab.KERNEL}.status === 'idle'")
    lab.start(page, "notebook:run-cell", TRAIN)
    lab.wait(page, 60)
    assert "NameError" in training.inner_text()  # nothing is left of the kernel that was
    lab.start(page, "notebook:run-all-above", TRAIN)
    lab.wait(page, LONG)
    outputs = [o for o in page.evaluate(lab.LOOK) if "NameError" not in o["text"]]
    assert lab.complaints(outputs) == []
    assert stopped(page, training, 1) > 0
