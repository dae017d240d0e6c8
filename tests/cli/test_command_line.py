"""`jaxpar train`, `jaxpar plot` and `jaxpar launch`: their options, their help, files of options, recipes."""

import argparse
import dataclasses
import re
import tomllib
import warnings
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launched import python, refused

import jaxpar
from jaxpar import __main__ as command_line, data, models, train
from jaxpar._cli import commands as other_commands, train as train_command
from jaxpar._core import options

ROOT = Path(jaxpar.__file__).parents[1]
COMMANDS = ("train", "plot", "plan", "port", "verify", "launch")
OPTIONS = Path(__file__).parent / "options.txt"


def parser_of(command):
    commands = argparse.ArgumentParser(prog="jaxpar").add_subparsers()
    command_line._launch.add_parser(commands)
    for module in (train_command, other_commands):
        module.add_parsers(commands)
    return commands.choices[command]


def filled(*words):
    """The options of `train` with the recipe's values for what is not given."""
    parser = parser_of("train")
    return train_command.fill(parser.parse_args(words), parser)


@pytest.fixture
def few(monkeypatch):
    """Few images, and the devices there are."""
    images = np.random.default_rng(0).integers(0, 256, (16, 28, 28, 1), np.uint8)
    dataset = data.Dataset(images, images[:, 14, 14, 0] // 26)
    monkeypatch.setattr(data, "load", lambda *args, **options: dataset)
    monkeypatch.setattr("jaxpar._cli.train._devices", lambda *args: jax.devices()[:2])


@pytest.fixture
def calls(few, monkeypatch):
    """What `create_state`, `make_train_step` and `fit` get. Nothing is trained."""
    calls = {}
    make = train.make_train_step

    def create_state(store, rng, **options):
        calls["store"] = store
        calls["state"] = {"rng": rng, **options}

    def make_train_step(loss_fn, **options):
        calls["step"] = options
        return make(loss_fn, **options)

    def fit(state, step, train_data, **options):
        calls["fit"] = options
        return None, [{"images_per_second": 1.0, "test_accuracy": 1.0, "test_loss": 0.0}]

    monkeypatch.setattr(train, "create_state", create_state)
    monkeypatch.setattr(train, "make_train_step", make_train_step)
    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setattr("jaxpar._cli.train._report", lambda *args: None)
    monkeypatch.setattr(train, "use_compilation_cache", lambda: calls.setdefault("cache", True))
    return calls


def test_version_and_the_script():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"jaxpar": "jaxpar.__main__:main"}
    run = python("-X", "importtime", "-m", "jaxpar", "--version")
    assert run.stdout == f"jaxpar {jaxpar.__version__}\n"
    assert not re.search(r"\| +jax$", run.stderr, re.MULTILINE)


def option_lines():
    """Each option of the commands, with how it is written, its default, its choices and how often it may be given."""
    for command in ("train", "plot", "plan", "port", "verify"):
        for action in parser_of(command)._actions:
            names = " ".join(action.option_strings) or action.dest.upper()
            kind = type(action).__name__.strip("_").removesuffix("Action")
            shown = [f"{name}={value}" for name in ("metavar", "nargs", "choices") if (value := getattr(action, name))]
            yield " ".join([command, names, kind, f"default={action.default}", *shown, "required" * action.required])


def test_the_options_stay():
    """Scripts of users have them. `python tests/cli/test_command_line.py` writes the file anew."""
    assert [line.rstrip() for line in option_lines()] == OPTIONS.read_text().splitlines()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    name: str = options.positional("of the network")
    stages: tuple[int, ...] = options.option((3, 4), "blocks of each stage; once for each", "--stage")
    norm: Literal["batch", "layer"] | None = options.option(None, "(default: none)")
    use_bias: bool = options.option(True, "of the convolutions")
    weights: Path | None = options.option(None, "(default: none)")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x"], Network(name="x")),
        (["x", "--stage=3", "--stage=6"], Network(name="x", stages=(3, 6))),
        (["x", "--norm=layer", "--no-use-bias", "--weights=w"],
         Network(name="x", norm="layer", use_bias=False, weights=Path("w"))),
        ([], "the following arguments are required: name"),
        (["x", "--stage=a"], "argument --stage: invalid int value: 'a'"),
        (["x", "--norm=group"], "argument --norm: invalid choice: 'group'"),
        (["x", "--weights=gs://w"], "argument --weights: "),
    ],
)  # fmt: skip
def test_a_dataclass_is_a_parser(capsys, words, expected):
    parser = argparse.ArgumentParser()
    options.add_options(parser, Network)
    if isinstance(expected, Network):
        assert options.read(parser.parse_args(words), Network) == expected
    else:
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_with_its_default(command):
    parser = parser_of(command)
    text = " ".join(parser.format_help().split())
    assert "None" not in text
    for action in parser._actions:
        assert action.help, action
        if action.option_strings and not action.required and action.dest != "help":
            shown = parser.formatter_class("jaxpar")._expand_help(action)
            assert shown.count("(default: ") == 1, (action.dest, shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--epocks", "3"], "unrecognized arguments: --epocks 3; did you mean --epochs?"),
        (["train", "--lerning-rate=3"], "did you mean --learning-rate?"),
        (["plot", "lenet", "--titel", "x"], "jaxpar plot: error: unrecognized arguments: --titel x; did you mean"),
        (["train", "--momentum", "0.5"], "--momentum is for --optimizer sgd, and this is adam"),
        (["train", "--recipe=lenet", "--weight-decay=0.1"], "for sgd, adamw, lamb, lion, muon, and this is adam; use"),
        (["train", "--recipe", "slow"], "'fast', 'lenet', 'article'"),
        (["train", "--loss-scale=much"], "must be a number above 0, got 'much'"),
        (["train", "--steps-per-execution=0"], "must be an int of 1 or more, got '0'"),
        (["train", "--epochs=0"], "argument --epochs: must be an int of 1 or more, got '0'"),
        (["train", "--epochs=1.5"], "must be an int of 1 or more, got '1.5'"),
        *((["train", f"--learning-rate={x}"], f"must be a number above 0, got '{x}'") for x in ("0", "inf", "nan")),
        (["train", "--metrics-file=m.csv"], "m.csv must end in .jsonl"),
        (["train", "--kvstore=disk"], "'sharded', 'dist_sync'"),
        (["train", "--compression=zip"], "'none', '1bit', '2bit'"),
    ],
)  # fmt: skip
def test_what_is_refused(capsys, words, message):
    said = refused(capsys, *words)
    for choices in ("fast, lenet, article", "sharded, dist_sync", "none, 1bit, 2bit"):  # of newer Pythons
        said = said.replace(choices, ", ".join(map(repr, choices.split(", "))))
    assert message in said


# What each option becomes, where it is looked for, and the options it needs.
REACHED = {
    "--engine=shard_map": ("step", "engine", "shard_map"),
    "--recipe=lenet": ("step", "engine", "pmap"),
    "--accumulate=2": ("step", "accumulate", 2),
    "--precision=bfloat16": ("step", "compute_dtype", "bfloat16"),
    "--precision=float16": ("step", "loss_scale", "dynamic"),
    "--loss-scale=8": ("step", "loss_scale", 8.0),
    "--nonfinite=skip": ("step", "nonfinite", "skip"),
    "--remat": ("step", "remat", True),
    "--local-steps=3": ("step", "local_steps", 3),
    "--epochs=7": ("fit", "epochs", 7),
    "--batch-size=8": ("fit", "batch_size", 8),
    "--steps-per-execution=2": ("fit", "steps_per_execution", 2),
    "--checkpoint-every=9": ("fit", "checkpoint_every", 9),
    "--keep=2": ("fit", "keep", 2),
    "--no-resume": ("fit", "resume", False),
    "--no-progress": ("fit", "progress", False),
    "--output-dir=o": ("fit", "checkpoint_dir", Path("o/checkpoints")),
    "--output-dir=r": ("fit", "metrics_file", Path("r/metrics.jsonl")),
    "--checkpoint-dir=c": ("fit", "checkpoint_dir", Path("c")),
    "--metrics-file=m.jsonl": ("fit", "metrics_file", Path("m.jsonl")),
    "--profile-dir=p": ("fit", "profile", Path("p")),
    "--seed=3": ("state", "rng", 3),
    "--kvstore=sharded": ("store", "kind", "sharded"),
    "--kvstore=dist_async --staleness=2": ("store", "staleness", 2),
}


@pytest.mark.parametrize("words", REACHED)
def test_options_reach_the_step(calls, capsys, words):
    part, name, value = REACHED[words]
    assert command_line.main(["train", "--batch-size=16", *words.split()]) == 0, capsys.readouterr().err
    found = calls[part]
    assert (found.get(name) if isinstance(found, dict) else getattr(found, name)) == value


def test_compression_reaches_the_store(calls):
    command_line.main(["train", "--compression=2bit", "--threshold=0.25"])
    assert calls["store"].compressor.threshold == 0.25


def test_a_step_that_cannot_be_cached_is_compiled_without_a_word(calls):
    if train_command.can_hang(jax.devices()):
        pytest.skip("on emulated devices this jax may hang with programs of the cache, so it is off")
    command_line.main(["train", "--devices=1"])
    assert calls["cache"]
    warnings.warn("Error writing persistent compilation cache entry for 'jit_train_steps'", stacklevel=1)  # no error


def test_clipping_reaches_what_it_is_for(calls):
    command_line.main(["train", "--clip-norm=0.5"])
    clipped, _ = calls["step"]["grad_transform"].update({"w": jnp.ones(4)}, optax.EmptyState())
    assert float(jnp.linalg.norm(clipped["w"])) == pytest.approx(0.5)
    assert calls["state"]["grad_transform"] is calls["step"]["grad_transform"]


@pytest.mark.parametrize("optimizer", train_command.OPTIMIZERS)
def test_optimizers_are_those_of_optax(optimizer):
    words = ["train", f"--optimizer={optimizer}", "--learning-rate=0.25", "--schedule=cosine"]
    words += ["--weight-decay=0.5"] if optimizer in train_command.DECAYS else []
    args = filled(*words[1:])
    tx, rate = train_command.optimizer(args, 10), optax.cosine_decay_schedule(0.25, 10)
    own = {
        "sgd": lambda: optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate, 0.9)),
        "adam": lambda: optax.adam(rate),
        "adamw": lambda: optax.adamw(rate, weight_decay=0.5),
        "lamb": lambda: optax.lamb(rate, weight_decay=0.5),
        "lion": lambda: optax.lion(rate, weight_decay=0.5),
        "muon": lambda: optax.nadam(optax.cosine_decay_schedule(0.06 * 0.25, 10), b2=0.99),  # of biases
    }[optimizer]()
    params, grads = jnp.arange(1.0, 4.0), jnp.ones(3)
    states = tx.init(params), own.init(params)
    update = jax.jit(lambda states: [t.update(grads, s, params) for t, s in zip((tx, own), states, strict=True)])
    for _ in range(2):
        (ours, first), (theirs, second) = update(states)
        states = first, second
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_muon_updates_each_weight_as_one_matrix():
    args = filled("--recipe=fast")
    tx = train_command.optimizer(args, 10)
    rng = np.random.default_rng(0)
    params = {"conv": jnp.zeros((2, 2, 3, 4)), "dense": jnp.zeros((12, 4))}
    grads = jnp.asarray(rng.normal(size=(12, 4)), jnp.float32)
    updates, _ = jax.jit(tx.update)({"conv": grads.reshape(2, 2, 3, 4), "dense": grads}, tx.init(params), params)
    np.testing.assert_array_equal(updates["conv"].reshape(12, 4), updates["dense"])
    singular = np.linalg.svd(updates["dense"], compute_uv=False) / 0.05  # the first of ten steps is at the peak
    assert singular.max() < 1.5
    assert singular.min() > 0.3


def test_a_linear_schedule_rises_for_a_tenth_and_falls_to_zero():
    args = filled("--recipe=fast", "--learning-rate=1")
    rate = train_command._schedule(args, 20)
    np.testing.assert_allclose([rate(step) for step in (0, 1, 10, 19, 20)], [0.5, 1, 10 / 19, 1 / 19, 0], atol=1e-6)
    assert float(train_command._schedule(args, 1)(0)) == 1


def test_the_articles_recipe_is_what_it_was(calls):
    command_line.main(["train", "--recipe=article", "--seed=3"])
    want = models.lenet.init(jax.random.key(3))
    store = calls["store"]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), jaxpar.kv.to_params(store), want))
    pushed = jaxpar.kv.push(store, list(store.values), [jnp.ones_like(v) for v in store.values.values()])
    np.testing.assert_allclose(jaxpar.kv.pull(pushed, 0), jaxpar.kv.pull(store, 0) - 0.2, rtol=1e-6)


def test_the_recipes_fill_what_is_not_given(calls):
    command_line.main(["train", "--recipe=fast"])
    fit = calls["fit"]
    assert (fit["epochs"], fit["batch_size"], fit["apply_fn"]) == (1, 128, models.strided.apply)
    command_line.main(["train", "--batch-size=16"])
    assert (calls["fit"]["epochs"], calls["fit"]["batch_size"]) == (5, 16)


def test_lenets_recipe_begins_with_weights_of_hes_size():
    params = train_command.RECIPES["lenet"].init(jax.random.key(0))
    spread = {name: float(layer["weight"].std()) for name, layer in params.items()}
    want = {name: (2 / fan_in) ** 0.5 for name, fan_in in
            {"conv1": 9, "conv2": 500, "dense1": 800, "dense2": 128}.items()}  # fmt: skip
    assert spread == pytest.approx(want, rel=0.15)
    assert all(not layer["bias"].any() for layer in params.values())
    assert jax.tree.structure(params) == jax.tree.structure(models.lenet.init(jax.random.key(0)))


def test_a_file_of_options(calls, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('epochs = 7\nbatch_size = 16\nengine = "jit"\nremat = true\nno-progress = true\nclip-norm = 2.5\n')
    assert command_line.main(["train", "--epochs=2", f"--config={file}", "--no-remat"]) == 0
    assert (calls["fit"]["epochs"], calls["fit"]["batch_size"], calls["fit"]["progress"]) == (2, 16, False)
    assert (calls["step"]["engine"], calls["step"]["remat"]) == ("jit", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocks = 3", "run.toml: unknown option 'epocks'; did you mean epochs?"),
        ("config = 'other.toml'", "run.toml: unknown option 'config'"),
        ("epochs = 0", "run.toml: argument --epochs: must be an int of 1 or more, got '0'"),
        ("engine = 'pmpa'", "run.toml: argument --engine: invalid choice: 'pmpa'"),
        ("remat = 1", "run.toml: remat must be true or false, got 1"),
        ("epochs = true", "run.toml: epochs must be a string or a number, got True"),
        ("[train]\nepochs = 1", "run.toml: unknown option 'train'"),
        ("epochs = [1]", "run.toml: epochs must be a string or a number, got [1]"),
        ("epochs 3", "run.toml is not TOML"),
    ],
)
def test_a_file_of_options_that_is_wrong(capsys, tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    assert message in refused(capsys, "train", "--config", str(tmp_path / "run.toml"))


def test_a_file_of_options_that_is_missing(capsys, tmp_path):
    assert "none.toml cannot be read: No such file" in refused(capsys, "train", f"--config={tmp_path}/none.toml")


@pytest.mark.parametrize("option", ["output-dir", "checkpoint-dir", "tensorboard-dir", "profile-dir"])
def test_a_folder_that_cannot_be_written_is_known_before_any_work(tmp_path, capsys, monkeypatch, option):
    monkeypatch.setattr("jaxpar._cli.train._devices", lambda *args: jax.devices()[:2])
    monkeypatch.setattr(data, "load", lambda *args, **options: pytest.fail("data were read"))
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert command_line.main(["train", f"--{option}={folder}"]) == 1
        message = f"--{option}: nothing can be written to {folder} (Not a directory); choose another directory"
        assert capsys.readouterr() == ("", f"jaxpar: OSError: {message}\n")
    monkeypatch.setattr("os.access", lambda *args: False)
    assert command_line.main(["train", f"--{option}={tmp_path}/a/b"]) == 1
    assert "a/b (Permission denied)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("count", "words"), [(1, "1 emulated CPU device,"), (2, "2 emulated CPU devices,")])
def test_the_devices_are_counted(count, words):
    assert words in train_command._about(filled("--recipe=lenet"), jax.devices()[:count])


@pytest.mark.slow
def test_what_is_printed(few, capsys, monkeypatch):
    """News goes to standard output, so that a notebook does not show it on red."""

    def linear(params, images):  # compiles in a second
        every = sum(x.sum() for x in jax.tree.leaves(params))  # no parameter is unused
        return images[:, 0, :10, 0] * every

    monkeypatch.setattr(models.lenet, "apply", linear)
    words = ["--recipe=lenet", "--epochs=1", "--batch-size=16", "--no-compilation-cache"]
    assert command_line.main(["train", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, epoch, last = out.splitlines()
    assert "engine pmap, kvstore device, compression none, batch 16, recipe lenet, adam, learning rate 0.002" in first
    assert epoch.startswith("epoch 1/1  loss ")
    assert last.startswith("trained 1 epochs, 1 steps: test accuracy ")


if __name__ == "__main__":
    OPTIONS.write_text("".join(line.rstrip() + "\n" for line in option_lines()))
