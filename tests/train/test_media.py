"""Images and texts of an `eval_fn`, as loggers show them."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image as Pillow
from world import start, step_of

from jaxpar import train

X = np.linspace(0, 1, 20 * 3, dtype=np.float32).reshape(20, 3)
DATA = {"x": X, "y": X.sum(1)}


def scores(params, batch):
    grey = jnp.broadcast_to(batch["x"][:, None], (len(batch["x"]), 2, 3))  # the rows of the data, twice
    return {
        "error": batch["x"] @ params["w"] - batch["y"],
        "grey": train.Image(grey, most=6),
        "colour": train.Image(jnp.stack([grey, 0 * grey, 2 * grey], -1), most=1),
        "letters": train.Text(jnp.uint8(97 + batch["x"] * 25), lambda row: bytes(row.tolist()).decode(), most=2),
    }


GREY = [np.tile((X[i] * 255).round().astype(np.uint8), (2, 1)) for i in range(6)]
LETTERS = [bytes(np.uint8(97 + X[i] * 25).tolist()).decode() for i in range(2)]


def fitted(board, **options):
    options = {"eval_data": DATA, "eval_fn": scores, "epochs": 2, "batch_size": 4, "progress": False, **options}
    return train.fit(start(4), step_of(), DATA, callbacks=board, **options)


def test_tensorboard_shows_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, TENSORS, EventAccumulator

    _, history = fitted(train.to_tensorboard(tmp_path / "board"), checkpoint_dir=tmp_path / "run")
    assert not [name for record in history for name in record if "grey" in name or "letters" in name]
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={IMAGES: 0, TENSORS: 0}).Reload()
    assert sorted(found.Tags()["images"]) == ["eval/colour/0", *(f"eval/grey/{i}" for i in range(6))]
    for i in range(6):  # from more than one batch, the first examples of the data in their order
        events = found.Images(f"eval/grey/{i}")
        assert [event.step for event in events] == [5, 10]
        pixels = np.asarray(Pillow.open(io.BytesIO(events[0].encoded_image_string)))
        np.testing.assert_array_equal(pixels, GREY[i])
    (colour, _) = found.Images("eval/colour/0")
    red, green, blue = np.moveaxis(np.asarray(Pillow.open(io.BytesIO(colour.encoded_image_string))), -1, 0)
    np.testing.assert_array_equal(red, GREY[0])
    assert not green.any()
    np.testing.assert_array_equal(blue[0], np.clip(2 * X[0] * 255, 0, 255).round())
    (first, _) = found.Tensors("eval/letters")
    assert [text.decode() for text in first.tensor_proto.string_val] == LETTERS


def test_a_callback_of_ones_own_and_evaluate_get_them():
    class Own:
        def __call__(self, state, record):
            json.dumps(record)

        def on_media(self, step, media):
            shown.append((step, sorted(media), media["eval_letters"].texts()))

    shown = []
    fitted(Own())
    names = ["eval_colour", "eval_grey", "eval_letters"]
    assert shown == [(5, names, LETTERS), (10, names, LETTERS)]
    found = train.evaluate({"w": np.ones(3, np.float32)}, data=DATA, eval_fn=scores, batch_size=4)
    np.testing.assert_array_equal(np.stack(found["grey"].pixels())[..., 0], GREY)


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_shows_them(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    board = train.to_mlflow("pictures", tracking_uri=tmp_path.as_uri())
    fitted(board)
    from mlflow import MlflowClient

    client = MlflowClient(tmp_path.as_uri())
    paths = [file.path for file in client.list_artifacts(board.run_id, "eval/grey")]
    assert paths == [f"eval/grey/{step:08}_{i}.png" for step in (5, 10) for i in range(6)]
    np.testing.assert_array_equal(np.asarray(Pillow.open(client.download_artifacts(board.run_id, paths[1]))), GREY[1])
    with open(client.download_artifacts(board.run_id, "eval/letters/00000005.txt")) as file:
        assert file.read().split() == LETTERS


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")  # of wandb's own
def test_wandb_shows_them_in_a_run_that_is_open(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="pictures", mode="offline", dir=str(tmp_path)) as own:
        fitted(train.to_wandb())
        assert wandb.run is own  # it goes on
        own.log({"after": 1})
    pictures = [np.asarray(Pillow.open(path)) for path in tmp_path.rglob("*grey*.png")]
    assert len(pictures) == 12
    assert sum(np.array_equal(picture, GREY[2]) for picture in pictures) == 2
    assert list(tmp_path.rglob("*letters*.table.json"))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: train.Image(np.zeros((2, 3))), r"\[2, 3\]"),
        (lambda: train.Image(np.zeros((2, 3, 3, 2))), "channels"),
        (lambda: train.Image(np.zeros((2, 3, 3), np.int32)), "int32"),
        (lambda: train.Text(np.zeros((2, 3)), "utf-8"), "decode"),
    ],
)
def test_mistakes(make, word):
    with pytest.raises((TypeError, ValueError), match=word):
        make()
