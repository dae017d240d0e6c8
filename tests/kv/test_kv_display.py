"""What a store looks like, typed at the prompt and in a notebook."""

import html.parser

import jax
import jax.numpy as jnp
import optax
import pytest
from kv_model import put

from jaxpar import kv, updaters


def test_the_text_of_a_store():
    store = kv.from_params({"w<1>": jnp.ones((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)}, optimizer=optax.sgd(0.1))
    lines = repr(store).splitlines()
    assert lines[0] == "KVStore(kind='device', updater=optax transform of all params, 2 keys, 32 bytes)"
    assert lines[1].split() == ["0", "b", "bfloat16[4]", "8", "cpu:0"]
    assert lines[2].split() == ["1", "w<1>", "float32[2,3]", "24", "cpu:0"]


def test_bytes_of_the_updater_and_the_compression_are_told():
    store = kv.init(kv.create("device"), 3, jnp.zeros(1000))
    store = kv.set_gradient_compression(kv.set_optimizer(store, optax.adam(0.1)), {"type": "2bit"})
    head = repr(store).splitlines()[0]
    assert "1 key, 4,000 bytes" in head
    assert "updater state 8,004 bytes" in head
    assert "compression=TwoBit(threshold=0.5)" in head


@pytest.mark.parametrize(
    ("updater", "name"),
    [
        (updaters.assign, "assign"),
        (updaters.accumulate, "accumulate"),
        (lambda k, p, s: p, "<lambda>"),
        (updaters.stateless(max), "max"),
    ],
)
def test_the_updater_is_named(updater, name):
    assert f"updater={name}" in repr(kv.set_updater(kv.create(), updater))


def test_the_devices_of_a_value():
    devices = jax.devices()[:3]
    device = kv.push(kv.init(kv.create("device"), 0, jnp.ones(6)), 0, put([jnp.ones(6)] * 3, devices))
    assert "a copy on cpu:0, cpu:1, cpu:2" in repr(device)
    sharded = kv.init(kv.create("sharded", devices=devices), 0, jnp.ones((2, 3)))
    assert "float32[2,3]" in repr(sharded)
    assert "spread over cpu:0, cpu:1, cpu:2" in repr(sharded)
    assert "cpu:1" in repr(kv.init(kv.create(), 0, jax.device_put(1.0, jax.devices()[1])))


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_it_shows_in_every_state(kind):
    store = kv.from_params({"w": jnp.ones((2, 3))}, kind=kind, devices=jax.devices()[:2])
    shown = []
    jax.jit(lambda s: shown.append(repr(s)) or shown.append(s._repr_html_()))(store)
    assert "traced" in shown[0]
    assert "float32[2,3]" in shown[0]
    specs = kv.partition_specs(store, "data")
    assert "P" in repr(specs)
    assert specs == kv.partition_specs(store, "data")
    assert specs != kv.partition_specs(store, "other") or kind == "device"
    assert repr(jax.tree.map(lambda x: None, store)).startswith("KVStore(")
    for leaf in jax.tree.leaves(store):
        leaf.delete()
    assert "float32[2,3]" in repr(store)


class Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_table_of_a_notebook():
    store = kv.from_params({"<script>": jnp.ones((2, 3))}, devices=jax.devices()[:2])
    parser = Balanced()
    parser.feed(store._repr_html_())
    assert parser.open == []
    titles = ["key", "name", "value", "bytes", "devices"]
    assert parser.cells == [*titles, "0", "<script>", "float32[2,3]", "24", "a copy on cpu:0, cpu:1"]
    assert "<script>" not in store._repr_html_()


def test_long_stores_are_cut():
    store = kv.init(kv.create(), range(25), [jnp.zeros(1)] * 25)
    assert repr(store).count("\n") == 21
    assert repr(store).endswith("... and 5 more")
    assert "... and 5 more" in store._repr_html_()
