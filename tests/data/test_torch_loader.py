"""PyTorch's own DataLoader. These tests run where PyTorch is installed: no extra has its 4.4 GB."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import data, train

torch = pytest.importorskip("torch", reason="PyTorch is not installed; with its CUDA libraries it has 4.4 GB")
utils = pytest.importorskip("torch.utils.data")

X = np.linspace(-1, 1, 40, dtype=np.float32).reshape(40, 1)
Y = 2 * X[:, 0]


class Rows:
    """A data set whose elements are dicts, as users write it."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": torch.from_numpy(X[i]), "y": float(Y[i])}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(), {}


def fit(source, devices=1, **options):
    state, step = train.start({"w": jnp.zeros(1)}, optax.sgd(0.1), loss_fn, devices=jax.devices()[:devices])
    return train.fit(state, step, source, **{"epochs": 2, "progress": False, **options})


def trained(source, **options):
    return fit(source, **options)[0].params["w"].tolist()


BATCHES = [{"x": X[i : i + 8], "y": Y[i : i + 8]} for i in range(0, 40, 8)]


@pytest.mark.parametrize("devices", [1, 4])
def test_a_loader_trains_as_its_batches(devices):
    assert trained(utils.DataLoader(Rows(), batch_size=8), devices=devices) == trained(BATCHES, devices=devices)


@pytest.mark.slow
def test_workers_of_a_loader_change_no_bit():
    def images(**options):
        loader = utils.DataLoader(utils.TensorDataset(torch.from_numpy(X), torch.arange(40)), batch_size=8, **options)
        return np.concatenate([batch["image"] for batch in data.batches(loader, epochs=1)])

    # Not by fork, of which JAX warns.
    np.testing.assert_array_equal(images(num_workers=2, multiprocessing_context="forkserver"), images())


def test_pairs_of_tensors_are_images_and_labels():
    pairs = utils.TensorDataset(torch.from_numpy(X), torch.arange(40))
    loader = utils.DataLoader(pairs, batch_size=8, shuffle=True)
    batches = list(data.batches(loader, epochs=1))
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels.tolist()) == list(range(40)) != labels.tolist()
    np.testing.assert_array_equal(np.concatenate([batch["image"] for batch in batches]), X[labels])
    dataset = data.collect(utils.DataLoader(pairs, batch_size=16))  # the last batch has 8
    np.testing.assert_array_equal(dataset.images, X)
    np.testing.assert_array_equal(dataset.labels, np.arange(40))


@pytest.mark.parametrize(("given", "expected"), [("bfloat16", "bfloat16"), ("float64", "float32"), ("bool", "bool")])
def test_dtypes_of_tensors(given, expected):
    tensor = torch.from_numpy(X)[:, 0].to(getattr(torch, given))
    (batch,) = data.from_iterable([{"x": tensor[::2]}]).batches(20)
    assert batch["x"].dtype == expected
    np.testing.assert_array_equal(batch["x"].astype(jnp.float32), tensor[::2].float().numpy())


def test_a_short_last_batch_is_refused_and_evaluated():
    with pytest.raises(ValueError, match=r"would have 8 examples; write .*batch_size=16, drop_last=True\)"):
        fit(utils.DataLoader(Rows(), batch_size=16))
    state, history = fit(utils.DataLoader(Rows(), batch_size=16, drop_last=True))
    assert [record["step"] for record in history] == [2, 4]
    loader = utils.DataLoader(Rows(), batch_size=16)

    def eval_fn(params, batch):
        return {"error": abs(batch["x"] @ params["w"] - batch["y"])}

    error = abs(X @ np.asarray(state.params["w"]) - Y).mean()
    assert train.evaluate(state, data=loader, eval_fn=eval_fn)["error"] == pytest.approx(error)
    found = train.predict(state, lambda params, batch: batch["x"] @ params["w"], loader)
    np.testing.assert_allclose(found, X @ np.asarray(state.params["w"]), rtol=1e-6)


def test_a_loader_without_a_length_needs_steps_per_epoch():
    class Stream(utils.IterableDataset):
        def __iter__(self):
            return iter(Rows()[i] for i in range(40))

    loader = utils.DataLoader(Stream(), batch_size=8)
    with pytest.raises(TypeError, match=r"a DataLoader has no length, .*steps_per_epoch="):
        fit(loader)
    assert trained(data.from_iterable(loader, steps_per_epoch=5)) == trained(BATCHES)


def test_a_run_on_a_loader_resumes(tmp_path):
    loader = utils.DataLoader(Rows(), batch_size=8)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    fit(loader, epochs=2, max_steps=7, **options)
    assert trained(loader, epochs=2, **options) == trained(BATCHES)
