"""Rules that split parameters over a mesh, and the shardings that they give to a pytree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv, parallel

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
KERNEL, BIAS = (768, 3072), (768,)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("axis", "shape", "spec"),
    [
        ("data", (768, 3072), P(None, "data")),
        ("data", (3072, 768), P("data")),
        ("data", (768, 768), P("data")),  # the first of equal ones
        ("data", (4, 767, 4), P("data")),  # the largest that 2 divides
        ("data", (12, 770, 5), P(None, "data")),
        ("data", (1023, 3), P()),  # none divides
        ("data", (1023,), P()),
        ("data", (1024,), P("data")),
        ("data", (512,), P()),  # small
        ("data", (), P()),
        ("data", (0, 4), P()),
        ("model", (3074, 764), P(None, "model")),
        (("data", "model"), (3076, 768), P(None, ("data", "model"))),
        (["model", "data"], (3072,), P(("model", "data"))),
        (("data",), (3072,), P("data")),
    ],
)
def test_fsdp_splits_the_largest_dimension_that_divides(axis, shape, spec):
    assert parallel.fsdp(axis)("a/b", shape, MESH) == spec
    parts = NamedSharding(MESH, spec).shard_shape(shape)
    assert all(whole % part == 0 for whole, part in zip(shape, parts, strict=True) if part)


def test_fsdp_options():
    assert parallel.fsdp(min_size=0)("bias", (2,), MESH) == P("data")
    assert parallel.fsdp(min_size=10_000)("kernel", (2, 4999), MESH) == P()
    assert parallel.fsdp(stacked_dims=1)("kernel", (96, 64, 64), MESH) == P(None, "data")
    assert parallel.fsdp()("kernel", (96, 64, 64), MESH) == P("data")
    assert parallel.fsdp(stacked_dims=2, min_size=0)("bias", (96,), MESH) == P()
    assert parallel.fsdp()("kernel", KERNEL, MESH.abstract_mesh) == P(None, "data")


def test_rules_are_values():
    assert parallel.fsdp() == parallel.fsdp("data") == parallel.fsdp(("data",))
    assert parallel.fsdp() != parallel.fsdp(min_size=1)
    assert repr(parallel.fsdp()) == "fsdp('data')"
    many = parallel.fsdp(("data", "model"), min_size=5, stacked_dims=1)
    assert repr(many) == "fsdp(('data', 'model'), min_size=5, stacked_dims=1)"

    def rules(spec):
        return parallel.sharding_rules({"*/kernel": spec}, default=parallel.fsdp(), then=many)

    assert rules(P("model")) == rules(P("model"))
    assert rules(P("model")) != rules(P("data"))
    assert len({rules(P()), rules(P()), parallel.fsdp(), parallel.fsdp()}) == 2
    assert repr(rules(P())) == f"sharding_rules({{'*/kernel': P()}}, default=fsdp('data'), then={many})"
    assert repr(parallel.sharding_rules({})) == "sharding_rules({})"
    with pytest.raises(dataclasses.FrozenInstanceError):
        parallel.fsdp().min_size = 3


def test_the_first_pattern_that_matches_counts():
    rule = parallel.sharding_rules(
        {"*/attention/*/kernel": P(None, "model"), "*/kernel": P("model"), "head/[ab]?": parallel.fsdp()},
        default=P(None, "data"),
    )
    assert rule("0/attention/query/kernel", KERNEL, MESH) == P(None, "model")
    assert rule("0/mlp/kernel", KERNEL, MESH) == P("model")
    assert rule("head/b1", KERNEL, MESH) == P(None, "data")
    assert rule("0/MLP/Kernel", KERNEL, MESH) == P(None, "data")  # letters count as they are
    assert rule("kernel", (3, 4), MESH) == P(None, "data")
    assert parallel.sharding_rules({"*/kernel": P("model")})("0/bias", KERNEL, MESH) == P()


@pytest.mark.parametrize(
    ("spec", "shape", "filled"),
    [
        (P(None, "model"), (768, 768), P("data", "model")),
        (P(None, None, "model"), (12, 768, 3072), P(None, "data", "model")),
        (P("model"), (768, 3072), P("model", "data")),
        (P("model"), (768,), P("model")),  # no dimension is free
        (P("data", "model"), KERNEL, P("data", "model")),  # the axis is used
        (P(("model", "data")), KERNEL, P(("model", "data"))),
        (P("model"), (4, 1001), P("model")),  # none divides
        (P("model"), (4, 1002), P("model")),  # a device holds 1,002 elements only
        (P(), (768, 3072), P(None, "data")),
    ],
)
def test_then_fills_what_a_pattern_leaves_free(spec, shape, filled):
    rule = parallel.sharding_rules({"kernel": spec}, then=parallel.fsdp("data"))
    assert rule("kernel", shape, MESH) == filled


def test_then_uses_the_axes_that_are_left():
    rule = parallel.sharding_rules({"*": P("model")}, then=parallel.fsdp(("data", "model")))
    assert rule("kernel", KERNEL, MESH) == P("model", "data")


PARAMS = {"dense": {"kernel": struct(*KERNEL), "bias": struct(*BIAS)}, "head": [struct(768, 10)]}


def specs(shardings):
    assert all(sharding.mesh == MESH for sharding in jax.tree.leaves(shardings))
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def test_a_pytree_prefix():
    given = {"dense": {"kernel": NamedSharding(MESH, P("model")), "bias": None}, "head": P("data")}
    assert specs(parallel.shardings_of(PARAMS, given, MESH)) == {
        "dense": {"kernel": P("model"), "bias": P()},
        "head": [P("data")],
    }
    mixed = {"dense": parallel.fsdp(), "head": lambda path, shape, mesh: P("model") if path == "head/0" else P()}
    assert specs(parallel.shardings_of(PARAMS, mixed, MESH)) == {
        "dense": {"kernel": P(None, "data"), "bias": P()},
        "head": [P("model")],
    }
    assert specs(parallel.shardings_of(struct(8), P("data"), MESH)) == P("data")
    assert parallel.shardings_of({}, parallel.fsdp(), MESH) == {}


OTHER = Mesh(np.array(jax.devices()[:2]), ("data",))


def test_what_the_parameters_come_with():
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)
    params = {
        "split": jax.device_put(jnp.ones(8), NamedSharding(MESH, P("model"))),
        "explicit": jax.device_put(jnp.ones(8), NamedSharding(explicit, P("data"))),
        "copies": jax.device_put(jnp.ones(8), NamedSharding(OTHER, P())),
        "one device": jnp.ones(8),
        "host": np.ones(8),
        "number": 1.0,
        "shape": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(MESH, P(("data", "model")))),
    }
    expected = {name: P() for name in params}
    expected |= {"split": P("model"), "explicit": P("data"), "shape": P(("data", "model"))}
    assert specs(parallel.shardings_of(params, None, MESH)) == expected
    elsewhere = {"layer": jax.device_put(jnp.ones(8), NamedSharding(OTHER, P("data")))}
    assert specs(parallel.shardings_of(elsewhere, P("model"), MESH)) == {"layer": P("model")}


def test_inside_jit():
    @jax.jit
    def split(x):
        shardings = parallel.shardings_of({"x": x}, parallel.fsdp(), MESH)
        return jax.lax.with_sharding_constraint({"x": x}, shardings)

    assert split(jnp.ones(1024))["x"].sharding.spec == P("data")


def test_parameters_are_made_where_they_belong():
    def init(rng):
        return {"kernel": jax.random.normal(rng, (64, 256)), "bias": jnp.zeros(64)}

    rule = parallel.sharding_rules({"kernel": P(None, "model")}, then=parallel.fsdp())
    shardings = parallel.shardings_of(jax.eval_shape(init, jax.random.key(0)), rule, MESH)
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    assert {shard.data.shape for shard in params["kernel"].addressable_shards} == {(32, 64)}
    assert kv.names(kv.from_params(params)) == {0: "bias", 1: "kernel"}  # the names that patterns are matched with


def linen_params(init_with, names, **options):
    init = init_with(linen.initializers.lecun_normal(), names, **options)
    return linen.Dense(8, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 4)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax
def test_metadata_of_linen():
    params = linen_params(linen.with_partitioning, ("data", "model"))
    kernel = {"kernel": linen.Partitioned(P("data", "model"), names=("data", "model")), "bias": P()}
    assert specs(parallel.shardings_of(params, None, MESH)) == {"params": kernel}
    # Boxes off, and their specs beside them.
    plain, given = linen.unbox(params), linen.get_partition_spec(params)
    assert specs(parallel.shardings_of(plain, given, MESH)) == {"params": {"kernel": P("data", "model"), "bias": P()}}
    assert specs(parallel.shardings_of(params, given, MESH)) == {"params": kernel}
    # A rule decides by itself. The path of a boxed parameter ends in what the box calls it.
    rule = parallel.sharding_rules({"params/kernel": P("model")})
    assert jax.tree.leaves(specs(parallel.shardings_of(params, rule, MESH))) == [P(), P("model")]
    store = kv.from_params(params)
    assert kv.names(store) == {0: "params/bias", 1: "params/kernel"}
    assert linen.get_partition_spec(kv.to_params(store)) == given


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax
def test_logical_names_of_linen():
    rules = (("embed", "data"), ("mlp", "model"))
    own = linen_params(linen.with_logical_partitioning, ("embed", "mlp"), rules=rules)
    bare = linen_params(linen.with_logical_partitioning, ("embed", "mlp"))
    assert jax.tree.leaves(specs(parallel.shardings_of(own, None, MESH))) == [P(), P("data", "model")]
    with linen.logical_axis_rules([("mlp", "model")]):
        assert jax.tree.leaves(specs(parallel.shardings_of(bare, None, MESH))) == [P(), P(None, "model")]
    with pytest.raises(ValueError, match=r"embed of .* is not found in mesh"):
        parallel.shardings_of(bare, None, MESH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax
def test_metadata_of_nnx():
    auto = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Auto,) * 2)

    def make(**metadata):
        return nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_metadata=metadata)

    with jax.set_mesh(auto):
        shapes = nnx.state(nnx.eval_shape(lambda: make(out_sharding=("data", "model"))), nnx.Param)
        params = nnx.state(make(out_sharding=("data", "model")), nnx.Param)
    for state in (shapes, params):
        assert jax.tree.leaves(specs(parallel.shardings_of(state, None, MESH))) == [P(), P("data", "model")]
        given = nnx.get_partition_spec(state)
        assert jax.tree.leaves(specs(parallel.shardings_of(state, given, MESH))) == [P(), P("data", "model")]
    others = {"number": nnx.Param(1.0), "several": nnx.Param({"a": jnp.ones(8), "b": jnp.ones(8)})}
    assert set(jax.tree.leaves(specs(parallel.shardings_of(others, None, MESH)))) == {P()}
    store = kv.from_params(nnx.state(make(), nnx.Param))
    rule = parallel.sharding_rules({kv.names(store)[1]: P("model")})
    assert jax.tree.leaves(specs(parallel.shardings_of(shapes, rule, MESH))) == [P(), P("model")]
