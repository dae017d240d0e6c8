"""The operators of the installed MXNet beside those of jaxpar: the tables of docs/mxnet_operators.md.

    .venv-mxnet/bin/python tools/mxnet_operators.py names    # writes tests/reference/mxnet_operator_names.json
    .venv/bin/python tools/mxnet_operators.py                # writes the page

An operator is yes, differs, or no. What is neither in jaxpar's table nor below among those that are missing ends this
script, and tests/mxnet/test_mxnet_room.py.
"""

import collections
import ctypes
import fnmatch
import json
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ROOT / "tests" / "reference" / "mxnet_operator_names.json"
PAGE = ROOT / "docs" / "mxnet_operators.md"

# Computed, but not all of it as MXNet 1.9.1 does.
DIFFERS = {
    "LeakyReLU": "`selu` has the gradient of the function, MXNet's is wrong below 0. `prelu`: MXNet's gradient of "
    "`gamma` is wrong where its input is another operator's output. `rrelu` draws from `rng`",
    "SoftmaxOutput": "`out_grad=True` multiplies by the gradient of its output, MXNet by the output",
    "SoftmaxActivation": "of more than two axes MXNet's gradient is that of another function",
    "Pooling": '`pooling_convention="same"` is an error, as in MXNet 1.9.1 itself',
    "take": '`mode="raise"` gives NaN, MXNet raises an error',
    "BatchNorm _contrib_BatchNormWithReLU": "`fix_gamma=True` does not read `gamma`, MXNet writes 1 to it",
    "_contrib_SyncBatchNorm": "the devices that share a batch are those of the training step, not `ndev` and `key`",
    "Dropout": "draws from `rng`",
    "RNN": "`use_sequence_length` ends each sequence at its length, as cuDNN does, and clipped states are refused: "
    "MXNet's CPU ignores both. `projection_size` has a gradient, MXNet's CPU has none",
    "_foreach": "running statistics inside are refused",
    "_while_loop": "what is behind the last step is 0, in MXNet memory that nothing wrote to. Without any step the "
    "shapes stay, MXNet's is (1,). Running statistics inside are refused",
    "_cond": "of what a branch does not take the gradient is 0, in MXNet memory that nothing wrote to where it is "
    "another operator's output. Running statistics inside are refused",
    "log_softmax": "`use_length=True` is refused",
    "Cast amp_cast": "of a cast to float16 and straight back XLA leaves nothing, so that no digits are lost",
    "CTCLoss": "an empty label has the loss of blanks alone, MXNet reads memory that nothing wrote. A label that is "
    "too long for its steps has the loss 0 as in MXNet, and no gradient, where MXNet's is what stood in memory",
    "_contrib_SparseEmbedding Embedding": "the gradient is dense, MXNet's of `sparse_grad=True` has rows",
    "cast_storage _sparse_retain _square_sum": "arrays stay dense",
    "_contrib_hawkesll": "all its arrays and both outputs have gradients, in MXNet only the likelihood by the rates, "
    "`alpha` and `beta`",
    "_contrib_RROIAlign": "with a `sampling_ratio` it has a gradient, MXNet has none",
    "_image_resize": "bilinear, bicubic and of the nearest pixel; other ways of OpenCV are refused. Whole numbers may "
    "differ by 1",
    "_image_flip_*": "the gradient is turned back, MXNet's is not",
    "_contrib_ModulatedDeformableConvolution": "has a gradient, MXNet's CPU has none",
    "shape_array size_array _histogram _contrib_index_array _npi_argmax _npi_argmin _npi_diag_indices_from"
    " _npi_indices": "whole numbers are int32, as JAX has them",
    "_arange": "`infer_range=True` is refused",
    "_random_uniform* _random_normal* _random_gamma* _random_exponential* _random_poisson* _random_negative_binomial*"
    " _random_generalized_negative_binomial* _random_randint _sample_* _shuffle _npi_uniform* _npi_normal*"
    " _npi_bernoulli _npi_exponential _npi_gamma _npi_gumbel _npi_logistic _npi_pareto _npi_powerd _npi_rayleigh"
    " _npi_weibull": ("draws from `rng`, so the numbers are others"),
    "_npi_svd": "vectors may have the other sign",
    "_npi_eigh": "vectors may have the other sign, and there is a gradient. MXNet's is 0",
    "_npi_std _npi_var _np_atleast_?d _npi_eigvalsh _npi_percentile _npi_pinv*": "has a gradient, MXNet's is 0",
    "_npi_average": "the sum of the weights has a gradient too",
    "_npi_copysign_scalar _npi_rcopysign_scalar _npi_pad": "has a gradient, MXNet has none for a number, nor for modes "
    "of `pad` other than `constant`",
    "_npi_where_lscalar _npi_where_rscalar _npi_rot90 _npi_rarctan2_scalar": "has the gradient of the "
    "function, MXNet's is wrong",
    "_npi_norm": "has the gradient of the function, MXNet's of the spectral norm is wrong",
    "_npi_matmul": "has the gradient of the function, MXNet's is wrong where an axis of the batch is broadcast",
}
# Not read, and why.
MISSING = {
    "a step of an optimizer: no saved network has it; `jp.mxnet.sgd` and others, or optax": (
        "*_update *_update_phase? multi_* preloaded_* reset_arrays all_finite _multi_* _mp_* _adamw_update"
    ),
    "8 bits: quantized networks are not read": "*quantize* _contrib_calibrate_entropy _sg_mkldnn_*",
    "code of your own in Python: give `operators={name: function}`": (
        "Custom _CustomFunction _Native _NDArray _CachedOp* _NoGradient _cvimdecode _cvimread _cvimresize"
        " _cvcopyMakeBorder _imdecode"
    ),
    "sparse arrays": (
        "_scatter_elemwise_div _scatter_minus_scalar _scatter_plus_scalar _contrib_dgl_*"
        " _contrib_edge_id _contrib_getnnz"
    ),
    "runs on GPUs only, so that it could not be compared": ("_contrib_count_sketch _contrib_fft _contrib_ifft"),
    "augmentation, which belongs into a loader or `loss_fn`": ("_image_random_* _image_*lighting"),
    "the shape of its result depends on values": (
        "_contrib_boolean_mask _npx_nonzero _npi_unique _npi_bincount _npi_delete"
    ),
    "writes into its input, or has no gradient of its own": (
        "_set_value _onehot_encode fill_element_0index _scatter_set_nd _zeros_without_dtype _broadcast_backward"
        " _contrib_backward_* _split_v2_backward _npi_boolean_mask_assign_* _npi_share_memory _npx_constraint_check"
        " _npi_hsplit_backward"
    ),
    "rare: give `operators={name: function}`": (
        "_sample_unique_zipfian _npi_choice _npi_multinomial _npi_eig _npi_eigvals _npi_insert_*"
    ),
}

# Names after `mx.sym.` that are no operators: what a file has of them.
FUNCTIONS = {
    "Variable var": "a variable: an entry of `model.inputs`, `model.params` or `model.state`",
    "Group": "several outputs: `model.outputs`, and `apply` gives a tuple",
    "Symbol": "the class itself: `model.symbol` is the graph as data",
    "load load_json": "no node: `jp.mxnet.load_symbol` reads the file",
    "arange eye full histogram linspace ones split_v2 zeros": "the operator of this name with `_` before it",
    "maximum minimum hypot": "`_maximum` and so on of two symbols, `_maximum_scalar` of a symbol and a number",
    "pow power": "`_power` of two symbols, `_power_scalar` or `_rpower_scalar` of a symbol and a number",
    "contrib": "operators whose names begin with `_contrib_`. `foreach`, `while_loop` and `cond` write `_foreach`, "
    "`_while_loop` and `_cond`; `rand_zipfian` writes several operators",
    "image linalg": "operators whose names begin with `_image_`, `_linalg_`",
    "random": "`_random_uniform` and so on where the parameters are numbers, `_sample_uniform` where they are symbols",
    "sparse": "the operators of the same names, and `_sparse_retain`",
    "numpy numpy_extension": "operators whose names begin with `_np_`, `_npi_` or `_npx_`, and many of `mx.sym`",
}


def write_names():
    """The names of MXNet's operators, {name in files: further names}, and those after `mx.sym.`; without gradients."""
    import mxnet as mx
    from mxnet.base import _LIB, check_call, mx_uint, py_str

    count, names = mx_uint(), ctypes.POINTER(ctypes.c_char_p)()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(count), ctypes.byref(names)))
    found = collections.defaultdict(list)
    for name in sorted(py_str(names[i]) for i in range(count.value)):
        if name.startswith(("_backward", "_npi_backward", "_npx_backward", "_np_backward")):
            continue
        handle, own, text, number = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_char_p(), mx_uint()
        lists = [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]
        check_call(_LIB.NNGetOpHandle(ctypes.c_char_p(name.encode()), ctypes.byref(handle)))
        places = [ctypes.byref(value) for value in (own, text, number, *lists, ctypes.c_char_p())]
        check_call(_LIB.NNGetOpInfo(handle, *places))
        found[py_str(own.value)].append(name)
    content = {"version": mx.__version__, "operators": found, "symbol": sorted(mx.symbol.__all__)}
    NAMES.write_text(json.dumps(content, sort_keys=True) + "\n")


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


def verdicts():
    """{name in files: (yes, differs or no; how or why)}, each operator under its name in files."""
    from jaxpar.mxnet._operators import OPERATORS

    found = {}
    for name, aliases in json.loads(NAMES.read_text())["operators"].items():
        if OPERATORS.keys() & {name, *aliases}:
            how = [how for patterns, how in DIFFERS.items() if matches(name, patterns)]
            found[name] = ("differs", how[0]) if how else ("yes", "")
        else:
            why = [why for why, patterns in MISSING.items() if matches(name, patterns)]
            if not why:
                raise SystemExit(f"{name} is neither computed nor among those that are missing: add it to MISSING")
            found[name] = ("no", why[0])
    return found


def page():
    content = json.loads(NAMES.read_text())
    found = verdicts()
    counts = collections.Counter(verdict for verdict, _ in found.values())
    of_alias = {alias: name for name, aliases in content["operators"].items() for alias in aliases}
    of_sym = collections.Counter(found[of_alias[name]][0] for name in content["symbol"] if name in of_alias)
    own = {name: verdict for name, verdict in found.items() if not name.startswith(("_np_", "_npi_", "_npx_"))}
    of_files = collections.Counter(verdict for verdict, _ in own.values())

    def listed(names):
        return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))

    functions = [(names.split(), meaning) for names, meaning in FUNCTIONS.items()]
    unknown = {name for name in content["symbol"] if name not in of_alias} ^ {
        n for names, _ in functions for n in names
    }
    if unknown:
        raise SystemExit(f"after mx.sym. there are {unknown}, or FUNCTIONS has them without need")

    text = f"""# MXNet's operators

This page lists the operators of MXNet {content["version"]} by the names that symbol files have. Further names of an
operator, such as `concat` of `Concat`, and names of older versions are read too. `tools/mxnet_operators.py` writes the
page, from the names that the installed MXNet has.

| | yes | differs | no |
|---|---:|---:|---:|
| all {len(found)}, without gradients | {counts["yes"]} | {counts["differs"]} | {counts["no"]} |
| the {len(own)} beside those of `mx.np` | {of_files["yes"]} | {of_files["differs"]} | {of_files["no"]} |
| the {sum(of_sym.values())} operators after `mx.sym.` | {of_sym["yes"]} | {of_sym["differs"]} | {of_sym["no"]} |

The tests compare them with MXNet, forward and backward, most of them alone and behind another operator, in float32 and
in float16 where MXNet computes it. Of the random ones they compare what numbers they are drawn from.

## Yes

{textwrap.fill(listed(name for name, (verdict, _) in found.items() if verdict == "yes"), 120)}

## Differs

| operator | how |
|---|---|
"""
    for how in DIFFERS.values():
        text += f"| {listed(name for name, verdict in found.items() if verdict == ('differs', how))} | {how} |\n"
    text += "\n## No\n\n| operator | why |\n|---|---|\n"
    for why, patterns in MISSING.items():
        names = [name for name, verdict in found.items() if verdict == ("no", why)]
        shown = ", ".join(f"`{pattern}`" for pattern in patterns.split()) if len(names) > 30 else listed(names)
        text += f"| {shown} ({len(names)}) | {why} |\n"
    text += "\n## Functions and modules\n\nThese names after `mx.sym.` are no operators.\n"
    text += "\n| name | in a symbol file |\n|---|---|\n"
    text += "".join(f"| {listed(names)} | {meaning} |\n" for names, meaning in functions)
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        write_names()
    else:
        PAGE.write_text(page())
