"""Every operator and set of attributes beside MXNet 1.9.1: outputs, gradients and running statistics."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import CASES, MORE, REFERENCE, apply, arrays_of, node, recorded, rule, symbol_of, write
from world import mostly_slow

from jaxpar import mxnet

EVALUATED = [name for name in CASES if "eval0" in recorded()[name] and not name.startswith("zoo")]
OPERATORS = [name for name in EVALUATED if name not in MORE["cases"]]
ALONE = [name for name in MORE["cases"] if not name.endswith(" behind")]
BEHIND = [name for name in MORE["cases"] if name.endswith(" behind")]

# The first row has one program of each kind, of operators in which an axis, an index, a guard or a default decides what
# comes out. The second row has all operators.
TRAINED = [
    *("Linear", "Logistic scale", "MakeLoss valid", "softmax output multi valid"),
    *("SequenceMask", "SequenceReverse", "SequenceLast", "slice like", "shape broadcast axis", "reshape join"),
    *("reshape split", "norm default", "group norm outputs", "lrn", "leaky prelu", "conv plain", "rnn lstm 1"),
    *("pool lp full True pad", "pool avg full False pad", "up nearest", "unary hard_sigmoid", "log_softmax default"),
    *("smooth l1", "activation softmax channel"),
]
LOOPS = ["foreach cell", "foreach nested", "while ends", "cond layers else"]
COMPUTED_ONCE = [
    *("nms background", "matching set", "target padded", "detection default", "encode", "decode", "Proposal"),
    *("roi align ratio", "correlation set", "deformable plain", "sampler", "grid affine"),
    *("image normalize", "adaptive pool one", "up sum", "ctc padded", "norm dtype", "round_ste", "allclose"),
    *("pdf negative_binomial", "target mining", "resize size", "selfatt qk", "gemm set", "modulated", "psroi set"),
]


# Where MXNet 1.9.1 is wrong, and what is not compared therefore. The gradients here are tested below.
WRONG = {
    "leaky selu": "grad",  # it takes lambda * (alpha + output)
    "softmax output head": "grad",  # it takes the output itself for the gradient of the output
    "activation softmax": "grad",  # of more than two axes: backward it takes all of them for one
    "leaky rrelu": "eval1",  # memory that nothing was written to
    # Of `mx.np`: it is 0,
    **dict.fromkeys(("np eigh", "np shape atleast_2d", "np shape atleast_3d", "np average returned"), "grad"),
    **dict.fromkeys((f"np {n}{k}" for n in ("std", "var") for k in ("", " axis", " last", " ddof", " behind")), "grad"),
    "np scalar": "grad",
    # that of the other choice, that of turning on, or another one.
    **dict.fromkeys(("np where left", "np where right", "np shape rot90", "np shape rot90 set"), "grad"),
    **dict.fromkeys(("np arctan2 of a number", "np norm spectral"), "grad"),
    **dict.fromkeys(("np matmul broadcast", "np matmul broadcast behind"), "grad"),  # where a batch is broadcast
}
# In float16 MXNet rounds in between, and is less exact than these.
HALF_ROUGH = (
    "roi align sensitive",
    "deformable psroi classes",
    "deformable psroi classes behind",
    "pdf gamma log behind",
    "pdf generalized behind",
    "pdf generalized log",
    "pdf negative_binomial",
    "pdf poisson log behind",
)


def close(found, expected, what):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=what)


def in_dozens(names):
    """Most of the time goes into making programs, so a dozen operators are one."""
    return [names[i : i + 12] for i in range(0, len(names), 12)]


def split(name):
    """The arrays of a case: what has gradients, integers, and running statistics."""
    arrays = arrays_of(name)
    state = {n: arrays.pop(n) for n in CASES[name]["aux"]}
    whole = {n: arrays.pop(n) for n, (_, kind) in CASES[name]["arrays"].items() if kind[0] == "i" and n in arrays}
    return {n: jnp.asarray(a) for n, a in arrays.items()}, whole, state


def weighted(name, outs):
    """A number that depends on all elements of the outputs, each with a weight of its own, as it was recorded."""
    heads = [jnp.asarray(rule(f"{name}/head{i}", out.shape, "n"), out.dtype) for i, out in enumerate(outs)]
    return sum((jnp.float32(out) * head).sum() for out, head in zip(outs, heads, strict=True))


OTHERS_TRAINED = in_dozens([name for name in OPERATORS if name not in TRAINED])


@pytest.mark.parametrize("names", mostly_slow([TRAINED, *OTHERS_TRAINED], TRAINED), ids=lambda names: names[0])
def test_they_compute_what_mxnet_computes(names, tmp_path):
    compare(names, tmp_path)


def test_loops_and_branches_compute_what_mxnet_computes(tmp_path):
    compare(LOOPS, tmp_path)


@pytest.mark.slow
def test_boxes_images_and_losses_compute_what_mxnet_computes(tmp_path):
    check_evaluation(COMPUTED_ONCE, *loaded(COMPUTED_ONCE, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("names", in_dozens(ALONE), ids=lambda names: names[0])
def test_the_other_operators(names, tmp_path):
    compare(names, tmp_path)


@pytest.mark.parametrize("names", mostly_slow(in_dozens(BEHIND), most=2), ids=lambda names: names[0])
def test_the_other_operators_behind_another_operator(names, tmp_path):
    compare(names, tmp_path)


def loaded(names, tmp_path):
    """The models and the arrays of cases."""
    return {name: mxnet.load_symbol(write(tmp_path, name)) for name in names}, {name: split(name) for name in names}


def check_evaluation(names, models, cases):
    @jax.jit
    def evaluated(floats):
        return {
            n: apply(models[n], {**floats[n], **whole}, state, train=False)[0] for n, (_, whole, state) in cases.items()
        }

    for name, outs in evaluated({name: cases[name][0] for name in names}).items():
        for i, out in enumerate(outs):
            if WRONG.get(name) != f"eval{i}":
                close(out, recorded()[name][f"eval{i}"], f"{name}: output {i} of an evaluation")


def compare(names, tmp_path):
    """Outputs of an evaluation and of a step, gradients and running statistics beside MXNet's."""
    models, cases = loaded(names, tmp_path)
    check_evaluation(names, models, cases)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(floats):
        found = {n: apply(models[n], {**floats[n], **cases[n][1]}, cases[n][2]) for n in floats}
        return sum((weighted(n, outs) for n, (outs, _) in found.items()), jnp.float32(0)), found

    grads, found = gradients({name: cases[name][0] for name in names if "out0" in recorded()[name]})
    for name, (outs, state) in found.items():
        expected = recorded()[name]
        for i, out in enumerate(outs):
            close(out, expected[f"out{i}"], f"{name}: output {i}")
        for n, grad in grads[name].items() if name not in WRONG else ():
            close(grad, expected[f"grad {n}"], f"{name}: gradient of {n}")
        for n in CASES[name]["aux"]:
            close(state[n], expected[f"aux {n}"], f"{name}: statistics {n}")


@pytest.mark.slow
def test_gradients_that_mxnet_has_wrong(tmp_path):
    x = jnp.asarray(rule("x", (5, 4), "n"))
    selu = mxnet.load_symbol(write(tmp_path, "leaky selu"))
    grad = jax.grad(lambda x: selu.apply({}, x).sum())(x)
    close(grad, jax.grad(lambda x: jax.nn.selu(x).sum())(x), "selu")
    head = mxnet.load_symbol(write(tmp_path, "softmax output head"))
    y, factor = jnp.array([0.0, 1, 2, 3, 1]), jnp.arange(20.0).reshape(5, 4)
    grad = jax.grad(lambda x: (head.apply({}, x, y) * factor).sum())(x)
    close(grad, (jax.nn.softmax(x) - jax.nn.one_hot(y.astype(int), 4)) * factor, "head")


Z = [0.0, -0.0, 1, -1]
HALVES = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
LP = {"kernel": (2,), "stride": (2,), "pool_type": "lp"}
# What MXNet 1.9.1 gives at ties, at 0 and at halves: operator, attributes, arrays; outputs, gradients of their sum.
AT_TIES = [
    ("LeakyReLU", {"act_type": "elu", "slope": 1.0}, [Z], [0, 0, 1, -0.63212], [[1, 1, 1, 0.36788]]),
    ("LeakyReLU", {"act_type": "elu", "slope": 0.3}, [Z], [0, 0, 1, -0.189636], [[0.3, 0.3, 1, 0.110364]]),
    ("LeakyReLU", {"act_type": "leaky", "slope": 0.3}, [Z], [0, 0, 1, -0.3], [[0.3, 0.3, 1, 0.3]]),
    ("LeakyReLU", {"act_type": "gelu"}, [Z], [0, 0, 0.841345, -0.158655], [[0.5, 0.5, 1.083315, -0.083315]]),
    ("_maximum_scalar", {"scalar": 0.0}, [Z], [0, 0, 1, 0], [[1, 1, 1, 0]]),
    ("_minimum_scalar", {"scalar": 0.0}, [Z], [0, 0, 0, -1], [[1, 1, 0, 1]]),
    ("broadcast_maximum", {}, [[0.0, 1, 2], [0.0, 2, 1]], [0, 2, 2], [[1, 0, 1], [0, 1, 0]]),
    ("broadcast_minimum", {}, [[0.0, 1, 2], [0.0, 2, 1]], [0, 1, 1], [[1, 1, 0], [0, 0, 1]]),
    ("abs", {}, [Z], [0, 0, 1, 1], [[0, 0, 1, -1]]),
    ("norm", {"ord": 1}, [Z], [2], [[0, 0, 1, -1]]),
    ("hard_sigmoid", {}, [[-2.5, 2.5, 0.0]], [0, 1, 0.5], [[0, 0, 0.2]]),
    ("clip", {"a_min": -1.0, "a_max": 1.0}, [[-1.0, 1, 0, 2]], [-1, 1, 0, 1], [[1, 1, 1, 0]]),
    ("relu", {}, [Z], [0, 0, 1, 0], [[0, 0, 1, 0]]),
    ("rint", {}, [HALVES], [-3, -2, -1, 0, 1, 2], [[0] * 6]),
    ("round", {}, [HALVES], [-3, -2, -1, 1, 2, 3], [[0] * 6]),
    ("_mod_scalar", {"scalar": 0.0}, [[5.0, -5, 0]], [0, 0, 0], None),
    ("_rmod_scalar", {"scalar": 5.0}, [[0.0, 2, -3]], [0, 1, -1], None),
    ("broadcast_mod", {}, [[5.0, -5, 5, 7], [3.0, 3, -3, 0]], [2, 1, -1, 0], None),
    ("broadcast_mod", {}, [[5.0, -5, 5, 7], [3.0, 3, -3, 2]], [2, 1, -1, 1], [[1, 1, 1, 1], [-1, 2, 2, -3]]),
    ("_mod_scalar", {"scalar": 0.0}, [[5.0, -5, 0.5]], [0, 0, 0], [[1, 1, 1]]),
    ("_rmod_scalar", {"scalar": 5.0}, [[3.0, -3, 2]], [2, -1, 1], [[-1, 2, -2]]),
    ("LeakyReLU", {"act_type": "selu"}, [[*Z, -0.5]], [0, 0, 1.050701, -1.111331, -0.691758], None),
    ("LeakyReLU", {"act_type": "prelu"}, [[[0.0, 1, -1], [2, -2, -3]], [0.25, 0.5, 2]],
     [[0, 1, -2], [2, -1, -6]], [[[0.25, 1, 2], [1, 0.5, 2]], [0, -2, -4]]),
    ("LeakyReLU", {"act_type": "prelu"}, [[[0.0, 1, -1], [2, -2, -3]], [0.25]],
     [[0, 1, -0.25], [2, -0.5, -0.75]], [[[0.25, 1, 0.25], [1, 0.25, 0.25]], [-6]]),
    ("Pooling", {**LP, "p_value": 1}, [[[[1.0, -3, 1, -1]]]], [[[-2, 0]]], [[[[1, 1, 1, 1]]]]),
    ("Pooling", {**LP, "p_value": 2}, [[[[3.0, -4, 0, 0]]]], [[[5, 0]]], [[[[0.6, -0.8, 0, 0]]]]),
    ("Pooling", {**LP, "p_value": 3}, [[[[1.0, -3, 1, -1]]]], [[[-2.962496, 0]]], [[[[0.113942, 1.025479, 0, 0]]]]),
    ("sum", {"exclude": True}, [[[1.0, 1, 1], [1, 1, 1]]], [6], [[[1, 1, 1], [1, 1, 1]]]),
]  # fmt: skip


def test_ties_zeros_and_halves():
    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(arrays_of_all):
        outputs = []
        for (name, attrs, *_), arrays in zip(AT_TIES, arrays_of_all, strict=True):
            by_model = {"train": False, "rng": None} if name == "LeakyReLU" else {}
            outputs.append(mxnet.operator(name)(*arrays, **attrs, **by_model))
        return sum(output.sum() for output in outputs), outputs

    found, outputs = gradients([[jnp.asarray(a) for a in arrays] for _, _, arrays, _, _ in AT_TIES])
    for (name, attrs, _, output, grads), out, of_arrays in zip(AT_TIES, outputs, found, strict=True):
        close(out, output, f"{name} {attrs}: output")
        for array, expected in zip(of_arrays, grads, strict=True) if grads is not None else ():
            close(array, expected, f"{name} {attrs}: gradient")


OVERLAPPING = [[0, 0.9, 0, 0, 1, 1], [1, 0.8, 0, 0, 1, 1]]  # class, score and box of two
# What options do that are left out, or at a number of their own: operator, attributes, arrays, output.
OF_OPTIONS = [
    ("_contrib_box_nms", {}, [OVERLAPPING], [OVERLAPPING[0], [-1] * 6]),
    ("_contrib_box_nms", {"topk": 0}, [OVERLAPPING], OVERLAPPING),
    ("_contrib_box_nms", {"id_index": 0}, [OVERLAPPING], OVERLAPPING),
    ("_contrib_box_nms", {"id_index": 0, "force_suppress": True}, [OVERLAPPING], [OVERLAPPING[0], [-1] * 6]),
    ("_contrib_MultiBoxDetection", {}, [[[[0.1], [0.9]]], [[0] * 4], [[[-0.5, -0.5, 0.5, 2]]]],
     [[[0, 0.9, 0, 0, 0.5, 1]]]),
    ("_contrib_bipartite_matching", {"threshold": 0.5}, [[[0.9, 0.8], [0.7, 0.1]]], ([0, -1], [0, -1])),
    ("_image_normalize", {}, [np.arange(4).reshape(4, 1, 1)], np.arange(4).reshape(4, 1, 1)),
    ("pick", {}, [[[1, 2], [3, 4]], [1, 0]], [2, 3]),
    ("take", {"mode": "raise"}, [[1, 2], [0, 1, 2, -1]], [1, 2, np.nan, np.nan]),
    ("pick", {"keepdims": True}, [[[1, 2], [3, 4]], [[1], [0]]], [[2], [3]]),
    ("_contrib_allclose", {}, [[1, 2], [1, 2.00001]], 1),
    ("_contrib_allclose", {}, [[1, 2], [1, 2.001]], 0),
    ("_contrib_allclose", {"atol": 0.01}, [[1, 2], [1, 2.001]], 1),
]  # fmt: skip


def test_options_that_are_left_out():
    @jax.jit
    def outputs(arrays_of_all):
        return [mxnet.operator(row[0])(*a, **row[1]) for row, a in zip(OF_OPTIONS, arrays_of_all, strict=True)]

    found = outputs([[jnp.asarray(a, jnp.float32) for a in arrays] for _, _, arrays, _ in OF_OPTIONS])
    for (name, attrs, _, expected), out in zip(OF_OPTIONS, found, strict=True):
        for one, there in zip(out, expected, strict=True) if isinstance(expected, tuple) else [(out, expected)]:
            close(one, there, f"{name} {attrs}")
    assert mxnet.operator("norm")(jnp.ones(3), out_dtype="float16").dtype == jnp.float16
    scores, deltas, info = jnp.ones((1, 24, 2, 2)), jnp.ones((1, 48, 2, 2)), jnp.ones((1, 3))
    proposal = mxnet.operator("_contrib_Proposal")
    assert jax.eval_shape(proposal, scores, deltas, info).shape == (300, 5)
    with_scores = jax.eval_shape(functools.partial(proposal, output_score=True), scores, deltas, info)
    assert [array.shape for array in with_scores] == [(300, 5), (300, 1)]
    dropped = mxnet.operator("Dropout")(jnp.ones((40, 5)), axes=(1,), train=True, rng=jax.random.key(0))
    assert set(np.unique(dropped)) == {0, 2}
    assert (dropped == dropped[:, :1]).all()
    draw = functools.partial(mxnet.operator("_sample_multinomial"), shape=(5,), rng=jax.random.key(0))
    assert jax.eval_shape(draw, jnp.ones((3, 4))).shape == (3, 5)


@pytest.mark.slow
def test_the_gradient_of_a_modulated_deformable_convolution(tmp_path):
    """MXNet computes it on GPUs only: here beside differences in float64."""
    with jax.enable_x64(True):
        model = mxnet.load_symbol(write(tmp_path, "modulated set"))
        arrays = {n: np.float64(a) for n, a in arrays_of("modulated set").items()}
        loss = jax.jit(lambda arrays: (apply(model, arrays, {}, train=False)[0][0] ** 2).sum())
        grads = jax.jit(jax.grad(loss))(arrays)
        for name, array in arrays.items():
            step = np.random.RandomState(0).standard_normal(array.shape)
            ends = [loss(arrays | {name: array + size * step}) for size in (1e-6, -1e-6)]
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, (grads[name] * step).sum(), rtol=1e-6)


def test_the_gradient_of_turned_regions():
    """MXNet has none. Each mean has weights that add up to 1, so the gradients of all means add up to their number."""
    images = jnp.asarray(rule("images", (1, 2, 9, 9), "n"))
    regions = jnp.array([[0, 4.0, 4, 3, 4, 30], [0, 3.0, 5, 2, 2, -45]])
    pool = functools.partial(
        mxnet.operator("_contrib_RROIAlign"), pooled_size=(2, 3), spatial_scale=1.0, sampling_ratio=2
    )
    grad = jax.jit(jax.grad(lambda images: pool(images, regions).sum()))(images)
    np.testing.assert_allclose(grad.sum((0, 2, 3)), [12, 12], rtol=1e-5)
    assert (grad[0, :, 0] == 0).all()  # far from both


def test_the_gradient_of_boxes_that_are_encoded_and_decoded_is_0_as_in_mxnet():
    """Those of SSD's detections are no way to its convolutions. MXNet 1.9.1 has `MakeZeroGradNodes` there."""
    decode, encode = mxnet.operator("_contrib_box_decode"), mxnet.operator("_contrib_box_encode")
    boxes = jnp.array([[[0.1, 0.2, 0.5, 0.7], [0.3, 0.1, 0.9, 0.4]]])
    grads = jax.grad(lambda *arrays: decode(*arrays).sum(), argnums=(0, 1))(boxes, boxes)
    ones, places = jnp.ones((1, 2)), jnp.array([[1.0, 0]])
    grads += jax.grad(lambda *a: encode(ones, places, *a, jnp.zeros(4), jnp.ones(4))[0].sum(), argnums=(0, 1))(
        boxes, boxes
    )
    assert all((grad == 0).all() for grad in grads)


def test_suppression_keeps_no_matrix_of_all_pairs_of_boxes():
    """175,000 boxes of gluoncv's SSD of 300 pixels took 150 GB."""
    count = 972  # of the proposals too: 9 * 9 places of 12 anchors
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    cases = {
        "_contrib_box_nms": [f(2, count, 6)],
        "_contrib_MultiBoxDetection": [f(2, 3, count), f(2, 4 * count), f(1, count, 4)],
        "_contrib_Proposal": [f(1, 24, 9, 9), f(1, 48, 9, 9), f(1, 3)],
    }
    for name, arrays in cases.items():
        text = str(jax.make_jaxpr(mxnet.operator(name))(*arrays))
        assert f"{count}" in text
        assert f"{count},{count}" not in text, name


A, B = [7, -7, 8], [2, 2, 3]
# The same of int32, which stay so.
OF_INTEGERS = [
    ("elemwise_div", {}, [A, B], [3, -3, 2]),
    ("_div_scalar", {"scalar": 2.0}, [A], [3, -3, 4]),
    ("_mul_scalar", {"scalar": 2.5}, [A], [14, -14, 16]),
    ("_plus_scalar", {"scalar": 2.5}, [A], [9, -5, 10]),
    ("_rdiv_scalar", {"scalar": 100.0}, [A], [14, -14, 12]),
    ("_rminus_scalar", {"scalar": 1.5}, [A], [-6, 8, -7]),
    ("_power_scalar", {"scalar": 2.0}, [A], [49, 49, 64]),
    ("_maximum_scalar", {"scalar": 1.5}, [A], [7, 1, 8]),
    ("_greater_scalar", {"scalar": 7.5}, [A], [0, 0, 1]),
    ("_mod_scalar", {"scalar": 3.0}, [A], [1, 2, 2]),
    ("_hypot_scalar", {"scalar": 2.0}, [A], [7, 7, 8]),
    ("clip", {"a_min": -1.5, "a_max": 2.5}, [A], [2, -1, 2]),
    ("sqrt", {}, [[7, 9, 8]], [2, 3, 2]),
    ("sigmoid", {}, [A], [0, 0, 0]),
    ("mean", {}, [A], [2]),
    ("sum", {}, [A], [8]),
]


@pytest.mark.parametrize(("name", "attrs", "arrays", "output"), OF_INTEGERS)
def test_whole_numbers_stay_whole(name, attrs, arrays, output):
    found = mxnet.operator(name)(*(jnp.asarray(a, jnp.int32) for a in arrays), **attrs)
    assert found.dtype == jnp.int32
    assert found.tolist() == output


CELL = [*(node("null", name) for name in ("x", "w", "b")), node("_zeros", "begin", shape=(0, 4))]
DENSE = node("FullyConnected", "h", 3, 1, 2, num_hidden=4)


@pytest.mark.parametrize("batch", [1, 3])
def test_states_of_an_unrolled_cell_have_the_batch_of_the_data(batch, tmp_path):
    """MXNet writes them as (0, 4) and infers the 0."""
    model = mxnet.load_symbol(symbol_of(tmp_path, *CELL, DENSE, node("elemwise_add", "y", 0, 4)))
    x, w, b = jnp.ones((batch, 4)), jnp.ones((4, 4)), jnp.arange(4.0)
    assert model.apply({"w": w, "b": b}, x).tolist() == [[1, 2, 3, 4]] * batch


@pytest.mark.parametrize("last", [DENSE, node("Concat", "y", 0, 3, dim=1)], ids=["output", "concat"])
def test_a_shape_that_stays_open_is_refused(last, tmp_path):
    with pytest.raises(ValueError, match=r"'begin' has a 0 in its shape, \(0, 4\), which jaxpar cannot infer"):
        mxnet.load_symbol(symbol_of(tmp_path, *CELL, last))


def test_take_says_where_an_index_is_out_of_bounds():
    take = mxnet.operator("take")
    array, indices = jnp.arange(5.0), jnp.array([1.0, 7.0, -1.0])
    assert take(array, indices).tolist() == [1, 4, 0]
    assert take(array, indices, mode="wrap").tolist() == [1, 2, 4]
    found = jax.jit(lambda array: take(array, indices, mode="raise"))(array)  # MXNet raises an error
    assert found[0] == 1
    assert jnp.isnan(found[1:]).all()


# The mean and the variance of what is drawn: MXNet's beta is a scale, and its lam is a rate of an exponential.
DRAWN = [
    ("_random_uniform", {"low": -1.0, "high": 3.0}, [], 1, 16 / 12),
    ("_random_normal", {"loc": 2.0, "scale": 3.0}, [], 2, 9),
    ("_random_gamma", {"alpha": 2.0, "beta": 3.0}, [], 6, 18),
    ("_random_exponential", {"lam": 2.0}, [], 0.5, 0.25),
    ("_random_poisson", {"lam": 4.0}, [], 4, 4),
    ("_random_negative_binomial", {"k": 3, "p": 0.4}, [], 4.5, 4.5 / 0.4),
    ("_random_generalized_negative_binomial", {"mu": 2.0, "alpha": 0.5}, [], 2, 4),
    ("_random_randint", {"low": 0, "high": 5}, [], 2, 2),
    ("_sample_gamma", {}, [2.0, 3.0], 6, 18),
    ("_sample_normal", {}, [2.0, 3.0], 2, 9),
    ("_sample_multinomial", {}, [0.0, 0.5, 0.0, 0.5], 2, 1),
]


@pytest.mark.slow
def test_what_is_drawn():
    count = 4000

    @jax.jit
    def draw(key):
        return [
            mxnet.operator(name)(
                *([jnp.array([n]) for n in numbers] if "multi" not in name else [jnp.array([numbers])]),
                shape=(count,),
                rng=jax.random.fold_in(key, i),
                **attrs,
            )
            for i, (name, attrs, numbers, *_) in enumerate(DRAWN)
        ] + [mxnet.operator("_random_normal_like")(jnp.zeros((count, 1)), loc=1.0, rng=key)]

    *found, like = draw(jax.random.key(0))
    for (name, _, numbers, mean, variance), values in zip(DRAWN, found, strict=True):
        assert values.shape == ((1, count) if numbers else (count,)), name
        assert abs(values.mean() - mean) < 5 * (variance / count) ** 0.5, name
        assert 0.8 < values.astype(float).var() / variance < 1.25, name
    assert (like.shape, abs(like.mean() - 1) < 0.1) == ((count, 1), True)
    drawn, log_probs = mxnet.operator("_sample_multinomial")(
        jnp.array([0.25, 0.75]), get_prob=True, rng=jax.random.key(0)
    )
    np.testing.assert_allclose(log_probs, np.log([0.25, 0.75])[drawn], rtol=1e-6)
    assert sorted(mxnet.operator("_shuffle")(jnp.arange(9), rng=jax.random.key(0)).tolist()) == list(range(9))


# The same of `mx.np`, whose numbers are attributes or arrays
DRAWN_BY_NUMPY = [
    ("_npi_uniform", {"low": -1.0, "high": 3.0}, 1, 16 / 12),
    ("_npi_normal", {"loc": 2.0, "scale": 3.0}, 2, 9),
    ("_npi_gumbel", {"loc": 1.0, "scale": 2.0}, 1 + 2 * np.euler_gamma, 4 * np.pi**2 / 6),
    ("_npi_logistic", {"loc": 1.0, "scale": 0.5}, 1, np.pi**2 / 12),
    ("_npi_gamma", {"shape": 2.0, "scale": 3.0}, 6, 18),
    ("_npi_exponential", {"scale": 2.0}, 2, 4),
    ("_npi_rayleigh", {"scale": 2.0}, (2 * np.pi) ** 0.5, 8 - 2 * np.pi),
    ("_npi_pareto", {"a": 5.0}, 1 / 4, 5 / 48),
    ("_npi_powerd", {"a": 3.0}, 3 / 4, 3 / 80),
    ("_npi_weibull", {"a": 2.0}, math.gamma(1.5), 1 - math.gamma(1.5) ** 2),
    ("_npi_bernoulli", {"prob": 0.3, "is_logit": False}, 0.3, 0.21),
]


@pytest.mark.slow
def test_what_numpys_random_operators_draw():
    count = 4000

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, len(DRAWN_BY_NUMPY))
        return [
            [
                mxnet.operator(name)(size=(count,), rng=key, **numbers),
                # The same numbers, the first one as an array
                mxnet.operator(name)(
                    jnp.full(count, next(iter(numbers.values()))), rng=key, **dict(list(numbers.items())[1:])
                ),
            ]
            for (name, numbers, _, _), key in zip(DRAWN_BY_NUMPY, keys, strict=True)
        ]

    for (name, _, mean, variance), found in zip(DRAWN_BY_NUMPY, draw(jax.random.key(0)), strict=True):
        for values in found:
            assert values.shape == (count,), name
            assert abs(values.mean() - mean) < 5 * (variance / count) ** 0.5, name
            assert 0.8 < values.var() / variance < 1.25, name
    means = jnp.array([[-100.0], [100.0]])
    each = mxnet.operator("_npi_normal_n")(means, jnp.ones(3), size=(5,), rng=jax.random.key(0))
    assert each.shape == (5, 2, 3)
    assert (each[:, 0] < 0).all()
    assert (each[:, 1] > 0).all()
    certain = mxnet.operator("_npi_bernoulli")(logit=99.0, is_logit=True, size=(4,), rng=jax.random.key(0))
    assert certain.tolist() == [1] * 4


# ---- Operators in float16 beside MXNet 1.9.1 on a CPU, and the dtype of what a network gives.


RECORDED = np.load(REFERENCE / "mxnet_float16.npz", allow_pickle=False)
COMPUTED = [name for name in OPERATORS if f"{name}/out0" in RECORDED and name not in ("dropout", *WRONG)]
OTHERS = [name for name in MORE["cases"] if "half out0" in recorded()[name] and name not in (*HALF_ROUGH, *WRONG)]
# Their result is float32 by themselves.
SINGLE = ("argmax", "shape cast", "argmin", "shape arange", "shape zeros", "embedding", "one hot")


def given(name, dtype):
    """The model, its arrays in a narrow dtype, and its statistics. As in MXNet, those of a BatchNorm are float32."""
    arrays = arrays_of(name)
    state = {n: arrays.pop(n) for n in CASES[name]["aux"]}
    wide = {n for n in arrays if state and n.endswith(("gamma", "beta"))}
    return {n: jnp.asarray(a, "float32" if n in wide else dtype) for n, a in arrays.items()}, state


def near_in_float16(found, expected, what):
    scale = max(np.abs(np.float32(expected)).max(), 1e-3)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=0, atol=4e-3 * scale, err_msg=what)


def in_float16(name, what):
    """What MXNet gives."""
    return RECORDED[f"{name}/{what}"] if name in OPERATORS else recorded()[name][f"half {what}"]


@pytest.mark.parametrize(
    "names", mostly_slow(in_dozens(COMPUTED) + in_dozens(OTHERS), in_dozens(COMPUTED)[0]), ids=lambda names: names[0]
)
def test_they_compute_in_float16_what_mxnet_computes(names, tmp_path):
    models = {name: mxnet.load_symbol(write(tmp_path, name)) for name in names}
    cases = {name: given(name, "float16") for name in names}
    whole = {name: {n: a for n, a in cases[name][0].items() if CASES[name]["arrays"][n][1][0] == "i"} for name in names}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(floats):
        found = {n: apply(models[n], {**floats[n], **whole[n]}, cases[n][1], rng=0)[0] for n in names}
        return sum(
            weighted(n, found[n]) for n in names if "out0" in recorded()[n]
        ), found  # of the others there are none

    floats = {name: {n: a for n, a in cases[name][0].items() if n not in whole[name]} for name in names}
    grads, found = gradients(floats)
    for name in names:
        for i, out in enumerate(found[name]):
            near_in_float16(out, in_float16(name, f"out{i}"), f"{name}: output {i}")
        for n, grad in grads[name].items() if "out0" in recorded()[name] else ():
            near_in_float16(grad, in_float16(name, f"grad {n}"), f"{name}: gradient of {n}")


def test_what_mxnet_cannot_compute_in_float16_on_a_cpu():
    refused = set(RECORDED["refused"])
    assert {"conv plain", "dense", "dot", "batch dot", "lrn", "rnn lstm 1", "deconv plain", "instance norm"} <= refused
    assert len(refused) + len(COMPUTED) > 270


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_have_the_dtype_of_the_arrays(dtype, tmp_path):
    for name in OPERATORS:
        if name.startswith(SINGLE):
            continue
        model = mxnet.load_symbol(write(tmp_path, name))
        arrays, state = given(name, dtype)
        outs, _ = jax.eval_shape(lambda a, m=model, s=state: apply(m, a, s, rng=0), arrays)
        expected = [dtype] + ["float32" if state else dtype] * (len(outs) - 1)  # statistics of a BatchNorm
        assert [out.dtype for out in outs] == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_network_in_a_narrow_dtype(dtype, tmp_path):
    name = "zoo mobilenet_v2_0_25"
    model = mxnet.load_symbol(write(tmp_path, name))
    arrays, state = given(name, dtype)
    arrays = {n: jnp.asarray(a, dtype) for n, a in arrays.items()}
    (out,), _ = jax.eval_shape(lambda a: apply(model, a, state, rng=0), arrays)
    assert out.dtype == dtype
