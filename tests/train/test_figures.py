"""Figures in a notebook: they read on a light and on a dark page."""

import io

import matplotlib
import matplotlib.figure
import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from jaxpar import train
from jaxpar.train._callbacks.history import History, line, metric_groups, number_text

TIMES = {"seconds": 1.0, "images_per_second": 100.0}
HISTORY = [{"epoch": i, "step": 3 * i, "loss": 1.0 / i, "eval_loss": 1.5 / i, **TIMES} for i in (1, 2, 3)]
MATRIX = np.arange(100).reshape(10, 10)


def luminance(colour):
    """As WCAG has it."""
    part = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(part, (0.2126, 0.7152, 0.0722)))


def contrast(one, other):
    low, high = sorted(luminance(colour) + 0.05 for colour in (one, other))
    return high / low


def assert_reads(texts):
    """On a light and on a dark page."""
    colours = [text.get_color() for text in texts]
    assert len(colours) > 8
    assert min(contrast(colour, page) for colour in colours for page in ("white", "#111111")) > 4


def live_figure():
    plot = train.LivePlot()
    for record in HISTORY:
        plot(None, record)
    return plot._plot()


@pytest.mark.parametrize(
    "draw",
    [lambda: train.plot_history(HISTORY), live_figure, lambda: train.plot_confusion_matrix(MATRIX)],
    ids=["history", "live", "matrix"],
)
def test_a_figure_reads_on_a_light_and_on_a_dark_page(draw):
    before = dict(matplotlib.rcParams)
    figure = draw()
    assert dict(matplotlib.rcParams) == before
    assert imread(io.BytesIO(figure._repr_png_()))[0, 0, 3] == 0
    cells = [text for axes in figure.axes if axes.images for text in axes.texts]  # on the colours of the matrix
    assert_reads(text for text in figure.findobj(Text) if text.get_text() and text not in cells)


def test_a_style_of_the_user_is_kept():
    with matplotlib.style.context("dark_background"):
        figure = train.plot_history(HISTORY)
    assert to_rgb(figure.get_facecolor()) == (0, 0, 0)
    assert to_rgb(figure.axes[0].xaxis.label.get_color()) == (1, 1, 1)


def test_a_confusion_matrix_cuts_no_label():
    figure = train.plot_confusion_matrix(MATRIX)
    figure._repr_png_()
    assert figure.axes[0].yaxis.label.get_window_extent().x0 >= 0


def test_figures_in_the_style_read_on_both_pages_and_get_no_white_ground():
    inline = pytest.importorskip("matplotlib_inline.backend_inline")
    with matplotlib.style.context("jaxpar.train.notebook"):
        figure = matplotlib.figure.Figure()
        axes = figure.subplots()
        axes.plot([1, 2], label="line")
        axes.set(xlabel="x", ylabel="y", title="title")
        axes.legend()
        figure.savefig(io.BytesIO())  # makes the labels of the ticks
        assert inline._fetch_figure_metadata(figure) is None  # else JupyterLab puts it on white, on a dark page too
    assert_reads(text for text in figure.findobj(Text) if text.get_text())


def test_words_table_and_curves_of_records():
    assert [number_text(value) for value in (0.25, 1e-7, 3)] == ["0.2500", "1.000e-07", "3"]
    record = {"epoch": 1, "loss": 2.3, "accuracy": 0.1, "seconds": 2.0, "images_per_second": 30000.0}
    assert line(record, 5) == "epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s"
    assert History([{"epoch": 1, "loss": 2.5, "accuracy": None}])._repr_html_().count("<td") == 2
    record = {"epoch": 1, "loss": 2.0, "eval_loss": 3.0, "eval_recall/0": 0.5, "accuracy": None}
    loss, recall = {"train": "loss", "eval": "eval_loss"}, {"eval 0": "eval_recall/0"}
    assert metric_groups([record]) == {"loss": loss, "recall": recall}


def test_a_live_plot_has_the_loss_first():
    plot = train.LivePlot()
    plot(None, {"epoch": 1, "step": 3, "norm": 2.0, "loss": 0.5, "eval_loss": 0.6, "seconds": 1.0})
    drawn = {axes.get_ylabel(): [row.get_label() for row in axes.get_lines()] for axes in plot._plot().axes}
    assert list(drawn.items()) == [("loss", ["train", "eval"]), ("norm", ["train"])]
