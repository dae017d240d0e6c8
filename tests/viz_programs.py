"""Random functions of nested transformations, and what a picture of any function must be.

    python tests/viz_programs.py                  2,000 of them, before a release
    python tests/viz_programs.py --seeds 7 12

A program is known by its seed. It maps params `a`, `b` and a vector `x` to a vector, or to gradients.
"""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.interpreters import partial_eval as pe
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import viz
from jaxpar.viz._searches import reach

WIDTH = 16  # whole arrays more or less are seen beside the numbers and the one array that XLA may fold
PARAMS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in "ab"}
X = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
SECONDS = 10  # that a picture may take

LAYERS = {
    "dense": lambda w, x: jnp.tanh(x @ w),
    "sine": lambda w, x: x * jnp.sin(x + w[0]),
    "norm": lambda w, x: x / (1 + jnp.sum(x * x)) + w[1],
    "attention": lambda w, x: jax.nn.softmax(x @ w) @ w,
    "leaky": lambda w, x: jnp.where(x > 0, x, w[1] * x),
    "sort": lambda w, x: jnp.sort(x) * 2 + jax.nn.gelu(w[0]),
    "layer norm": lambda w, x: (x - x.mean()) * lax.rsqrt(x.var() + 1e-5) * w[0] + w[1],
    "gather": lambda w, x: w[jnp.argmax(x)] + x,
    "scatter": lambda w, x: jnp.zeros(WIDTH).at[jnp.argsort(x)].add(w[0]) * x,
    "slices": lambda w, x: jnp.concatenate([x[1:] * w[0, 1:], x[:1]]),
    "cumulative": lambda w, x: jnp.cumsum(x) + jnp.cumprod(w[2]),
    "convolution": lambda w, x: jnp.convolve(x, w[0], mode="same"),
    "largest": lambda w, x: jnp.maximum(x, w[0]) - jnp.max(w @ x),
    "power": lambda w, x: x**3 + jnp.exp2(w[3]) * x**-2,
    "logsumexp": lambda w, x: x - jax.nn.logsumexp(w + x[None], axis=1),
    "cast": lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
    "frozen": lambda w, x: lax.stop_gradient(x) * w[0] + jnp.round(x),
    "outer": lambda w, x: jnp.einsum("i,ij,k->jk", x, w, jnp.cos(x)).sum(0),
}


def grad(f, g, rng):
    return lambda p, x: jax.grad(lambda x: jnp.sum(f(p, x) ** 2))(x)


def grad_of_params(f, g, rng):
    return lambda p, x: sum(jax.grad(lambda p: jnp.sum(f(p, x)))(p)[name][0] for name in p)


def jvp(f, g, rng):
    return lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (jnp.cos(x),))[1]


def vjp(f, g, rng):
    def call(p, x):
        y, pull = jax.vjp(lambda x: f(p, x), x)
        return pull(jnp.sin(y))[0] + y

    return call


def hessian_product(f, g, rng):
    return lambda p, x: jax.jvp(jax.grad(lambda x: jnp.sum(f(p, x) ** 2)), (x,), (g(p, x),))[1]


def jacobian(f, g, rng):
    of = rng.choice([jax.jacfwd, jax.jacrev])
    return lambda p, x: of(lambda x: f(p, x))(x) @ x


def vmap(f, g, rng):
    return lambda p, x: jax.vmap(lambda x: f(p, x))(jnp.stack([x, 2 * x])).sum(0)


def vmap_of_params(f, g, rng):
    return lambda p, x: jax.vmap(f, (0, None))(jax.tree.map(lambda w: jnp.stack([w, w + 1]), p), x)[1]


def scan(f, g, rng):
    length, reverse = rng.randrange(1, 4), rng.random() < 0.3

    def call(p, x):
        def body(c, i):
            return (f(p, c) + i, c.sum())

        last, ys = lax.scan(body, x, jnp.arange(float(length)), reverse=reverse)
        return last + ys.sum()

    return call


def scan_of_pairs(f, g, rng):
    """What is carried goes through another carried value, and there is one that only the next pass reads."""

    def call(p, x):
        def body(carry, _):
            first, second, count = carry
            return (f(p, second), g(p, first) * count.sum(), count + 1), first[0] + second

        (first, _, _), ys = lax.scan(body, (x, jnp.cos(x), jnp.float32(1)), None, length=3)
        return first + ys[1]

    return call


def scan_of_layers(f, g, rng):
    def call(p, x):
        return lax.scan(lambda c, q: (f(q, c), None), x, jax.tree.map(lambda w: jnp.stack([w, w * 2]), p))[0]

    return call


def fori(f, g, rng):
    return lambda p, x: lax.fori_loop(0, 3, lambda i, c: f(p, c) * i, x)


def while_loop(f, g, rng):
    return lambda p, x: lax.while_loop(lambda c: c[1] < 5.0, lambda c: (f(p, c[0]), c[1] + 1), (x, 0.0))[0]


def while_of_scalars(f, g, rng):
    def call(p, x):
        def body(carry):
            y, scale, count = carry
            return y * scale, scale + f(p, x)[0], count + 1

        return lax.while_loop(lambda c: c[2] < 4, body, (jnp.ones_like(x), x[0], 0))[0]

    return call


def map_(f, g, rng):
    return lambda p, x: lax.map(lambda y: f(p, y), jnp.stack([x, x + 1]))[1]


def associative(f, g, rng):
    return lambda p, x: lax.associative_scan(jnp.multiply, jnp.stack([f(p, x), x, g(p, x)]))[-1]


def cond(f, g, rng):
    return lambda p, x: lax.cond(x[0] > 0, lambda x: f(p, x), lambda x: g(p, x), x)


def switch(f, g, rng):
    return lambda p, x: lax.switch(jnp.argmax(x), [lambda x: f(p, x), lambda x: x, lambda x: g(p, x), jnp.tanh], x)


def remat(f, g, rng):
    policy = rng.choice([None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable])
    return lambda p, x: jax.checkpoint(lambda p, x: f(p, x), policy=policy)(p, x)


def jit(f, g, rng):
    return lambda p, x: jax.jit(lambda p, x: f(p, x))(p, x)


def jit_called_twice(f, g, rng):
    jitted = jax.jit(f)
    return lambda p, x: jitted(p, jitted(p, x))


def after(f, g, rng):
    return lambda p, x: g(p, f(p, x)) + x


def times(f, g, rng):
    return lambda p, x: f(p, x) * g(p, x)


def inner_step(f, g, rng):
    def call(p, x):
        d = jax.grad(lambda p: jnp.sum(f(p, x) ** 2))(p)
        return g({name: p[name] - 0.1 * d[name] for name in p}, x)

    return call


def custom_vjp(f, g, rng):
    @jax.custom_vjp
    def call(p, x):
        return f(p, x)

    def backward(kept, cotangent):
        p, x = kept
        return jax.tree.map(lambda w: w * cotangent.sum(), p), cotangent * jnp.cos(x)

    call.defvjp(lambda p, x: (f(p, x), (p, x)), backward)
    return call


def custom_jvp(f, g, rng):
    @jax.custom_jvp
    def call(p, x):
        return f(p, x)

    @call.defjvp
    def rule(primals, tangents):
        (p, x), (dp, dx) = primals, tangents
        return call(p, x), g(p, x) * dx + dp["a"][0]

    return call


def linear_solve(f, g, rng):
    def call(p, x):
        matrix = jnp.eye(WIDTH) * 9 + p["a"]

        def solve(matvec, b):
            return jnp.linalg.solve(matrix, b)

        return lax.custom_linear_solve(lambda v: matrix @ v, f(p, x), solve, solve)

    return call


def named(f, g, rng):
    def call(p, x):
        with jax.named_scope("block"):
            return f(p, x)

    return call


def constant(f, g, rng):
    mask = jnp.arange(float(WIDTH))
    return lambda p, x: f(p, x * mask) + g(p, jnp.ones(WIDTH)) * x


def shard_map(f, g, rng):
    def local(p, x):
        return lax.psum(f(p, x), "data") + lax.ppermute(x, "data", [(0, 1), (1, 0)])

    mesh = Mesh(jax.devices()[:2], ("data",))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return lambda p, x: mapped(p, x)


AROUND = [
    *(grad, grad_of_params, jvp, vjp, hessian_product, jacobian, vmap, vmap_of_params, scan, scan_of_pairs),
    *(scan_of_layers, fori, while_loop, while_of_scalars, map_, associative, cond, switch, remat, jit),
    *(jit_called_twice, after, times, inner_step, custom_vjp, custom_jvp, linear_solve, named, constant, shard_map),
]


def compose(rng, depth, made):
    """A random function of params and a vector. `made` gets the names of what it is made of."""
    if depth == 0:
        name, key = rng.choice(list(LAYERS)), rng.choice("ab")
        made.append(name)
        return lambda p, x: LAYERS[name](p[key], x)
    kind = rng.choice(AROUND)
    made.append(kind.__name__)
    return kind(compose(rng, depth - 1, made), compose(rng, rng.randrange(depth), made), rng)


def program(seed):
    """The random function of a seed, and what it is made of."""
    rng, made = random.Random(seed), []
    f = compose(rng, rng.randrange(1, 5), made)
    ends = {
        "values": f,
        "gradient": lambda p, x: jax.grad(lambda p: jnp.sum(f(p, x)))(p),
        "value and gradient": lambda p, x: jax.value_and_grad(lambda p, x: jnp.sum(f(p, x) ** 2), (0, 1))(p, x),
        "gradient of a gradient": lambda p, x: jax.grad(
            lambda p: jnp.sum(jax.grad(lambda x: jnp.sum(f(p, x)))(x) ** 2)
        )(p),
    }
    end = rng.choice(list(ends))
    return ends[end], [end, *made]


def scan_counts(params):
    """How many constants and carried values a scan has."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    return tuple(map(len, params["ft_in"].unpack()[:2]))  # jax 0.12


def dependencies(closed, everything=False):
    """The arguments that each result depends on, by position. Or those that each equation does."""
    read = []

    def results(jaxpr, ins):
        env = dict(zip(jaxpr.invars, ins, strict=True)) | dict.fromkeys(jaxpr.constvars, frozenset())

        def of(atom):
            return frozenset() if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [of(atom) for atom in eqn.invars]
            read.extend(ins)
            env |= zip(eqn.outvars, of_equation(eqn, ins), strict=True)
        return [of(atom) for atom in jaxpr.outvars]

    def repeated(body, consts, carry, rest):
        while True:
            outs = results(body, [*consts, *carry, *rest])
            new = [before | after for before, after in zip(carry, outs, strict=False)]
            if new == carry:
                return outs
            carry = new

    def of_equation(eqn, ins):
        name, params = eqn.primitive.name, eqn.params
        body = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        body = getattr(body, "jaxpr", body)
        if name == "scan":
            consts, carry = scan_counts(params)
            return repeated(body, ins[:consts], ins[consts : consts + carry], ins[consts + carry :])
        if name == "while":
            tests, consts = params["cond_nconsts"], params["body_nconsts"]
            return repeated(params["body_jaxpr"].jaxpr, ins[tests : tests + consts], ins[tests + consts :], [])
        if name == "cond":
            branches = [results(branch.jaxpr, ins[1:]) for branch in params["branches"]]
            return [ins[0].union(*each) for each in zip(*branches, strict=True)]
        if body is not None and len(body.invars) == len(ins):
            return results(body, ins)
        return [frozenset().union(*ins)] * len(eqn.outvars)

    ends = results(closed.jaxpr, [frozenset([at]) for at in range(len(closed.jaxpr.invars))])
    return read if everything else ends


def written_out(closed):
    """The function of a jaxpr without loops and choices: each pass of a scan, one of a while, and all branches.

    It also returns what each pass and branch gives, so that XLA counts the passes and branches in full. With it comes a
    list that gets, as the function is traced, how many passes each loop counts.
    """
    also, counts = [], []

    def run(closed, args):
        jaxpr, env = getattr(closed, "jaxpr", closed), {}
        env |= zip([*jaxpr.constvars, *jaxpr.invars], [*getattr(closed, "consts", ()), *args], strict=True)

        def read(atom):
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outs = run_equation(eqn, [read(atom) for atom in eqn.invars])
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def run_equation(eqn, ins):
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, carry = scan_counts(params)
            # One by one: what a loop begins with and no pass reads is not computed.
            carried, outs = list(map(lax.optimization_barrier, ins[consts : consts + carry])), []
            whole = [atom for atom in eqn.invars[consts : consts + carry] if atom.aval.str_short() == "int32[]"]
            counts.append(len(whole) * params["length"])
            for at in range(params["length"]):
                # XLA does not fold what it does not know: what a pass carries, and what it reads of an array.
                xs = [lax.optimization_barrier(xs[at]) for xs in ins[consts + carry :]]
                outs = run(params["jaxpr"], [*ins[:consts], *carried, *xs])
                carried = list(map(lax.optimization_barrier, outs[:carry]))
                also.extend(outs)
            return [*carried, *(jnp.stack([out] * params["length"]) for out in outs[carry:])]
        if name == "while":
            tests, consts = params["cond_nconsts"], params["body_nconsts"]
            carried = list(map(lax.optimization_barrier, ins[tests + consts :]))
            carried = run(params["body_jaxpr"], [*ins[tests : tests + consts], *carried])
            also.extend([*carried, *run(params["cond_jaxpr"], [*ins[:tests], *ins[tests + consts :]])])
            return carried
        if name == "cond":
            outs = [run(branch, ins[1:]) for branch in params["branches"]]
            also.extend(itertools.chain(ins[:1], *outs))
            return lax.optimization_barrier(outs[0])
        if name == "shard_map":
            specs = {spec: params[spec] for spec in ("mesh", "in_specs", "out_specs", "check_vma")}
            return jax.shard_map(lambda *ins: tuple(run(params["jaxpr"], ins)), **specs)(*ins)
        body = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if body is not None and len(getattr(body, "jaxpr", body).invars) == len(ins):
            return run(body, ins)
        outs = eqn.primitive.bind(*ins, **params)
        if name in ("stack", "concatenate"):
            # Of constants, what reads them is computed by the compiler, up to 65,536 elements.
            outs = lax.optimization_barrier(outs)
        return outs if eqn.primitive.multiple_results else [outs]

    def call(*args):
        return run(closed, args), also

    return call, counts


NESTED = {"scan", "while", "cond"}
UNLIKE_XLA = {"lu", "triangular_solve", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "fft"}


def primitives(jaxpr):
    """The names of all primitives of a jaxpr."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            if hasattr(inner := getattr(param, "jaxpr", param), "eqns"):
                names |= primitives(inner)
    return names


def flops_of(closed, args):
    """What XLA counts, with each pass of a scan and each branch of a cond, and how many passes are counted in that.

    None where XLA counts in another way.
    """
    names = primitives(closed.jaxpr)
    if names & UNLIKE_XLA or (names & NESTED and "shard_map" in names):
        return None
    live, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    (fn, counts), args = written_out(closed.replace(jaxpr=live)), jax.tree.leaves(args)
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return (lowered.cost_analysis() or {}).get("flops", 0), sum(counts)


def faults_of(fn, *args):
    """What is wrong with the picture and the table of a function: sentences."""
    began = time.process_time()
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    arguments = ["p['a']", "p['b']", "x"]
    needed = dict(zip(["output" + path for path in paths], dependencies(closed), strict=True))
    traced = time.process_time() - began
    began = time.process_time()
    viz.print_summary(fn, *args, file=io.StringIO())
    plot = viz.plot_network(fn, *args)
    assert plot.source.startswith("digraph")
    whole = viz.trace(fn, *args, max_nodes=None, repeats=False)
    seconds = time.process_time() - began - 3 * traced  # each of them traces the function anew
    faults = [f"seconds: {seconds:.0f}"] if seconds > SECONDS else []
    for graph in (plot.network, whole):
        faults += _lost(graph, {output: {arguments[at] for at in needed[output]} for output in needed})
        place = {node.name: at for at, node in enumerate(graph.nodes)}
        backwards = [edge for edge in graph.edges if not edge.carry and place[edge.source] >= place[edge.target]]
        faults += [f"edge backwards: {edge.source} -> {edge.target}" for edge in backwards]
        # A param of a layer whose gradient is computed counts, even if nothing reads its values.
        reads = dependencies(closed, everything=True)
        least, most = (len(frozenset().union(*sets) - {2}) * WIDTH**2 for sets in (needed.values(), reads))
        if not least <= graph.total_params == sum(node.params for node in graph.nodes) <= most:
            faults.append(f"params: {graph.total_params} for {least} to {most}")
    if graph.uncounted:
        faults.append(f"not counted: {graph.uncounted}")
    if (counted := flops_of(closed, args)) is not None:
        flops, passes = counted
        for graph in (plot.network, whole):
            # A loop that counts its passes adds 1 in each, which the picture leaves out.
            if abs(graph.total_flops - flops) >= max(2 * WIDTH, 0.005 * flops) + passes:
                faults.append(f"FLOPs: {graph.total_flops} for {flops:.0f}")
    return list(dict.fromkeys(faults))


def _lost(graph, needed):
    """The dependencies of each result that no way in a graph shows."""
    sources, faults = collections.defaultdict(set), []
    for edge in (*graph.edges, *graph.weight_edges):
        sources[edge.target].add(edge.source)
    makers = {output: node.name for node in graph.nodes for output in node.outputs}
    for output, names in needed.items():
        if output in makers:
            lost = names - reach([makers[output]], sources)
            faults += [f"lost: {output} does not depend on {', '.join(sorted(lost))}"] if lost else []
        elif len(names) > 1:  # else it is an argument
            faults.append(f"lost: {output}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*")
    options = parser.parse_args()
    seeds = options.seeds or range(options.first, options.first + options.number)
    kinds, examples, began = collections.Counter(), collections.defaultdict(list), time.time()

    def late(*_):
        raise TimeoutError(f"longer than {6 * SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    for seed in seeds:
        fn, made = program(seed)
        try:
            jax.jit(fn).lower(PARAMS, X)
        except Exception as error:  # such as the gradient of a while loop
            kinds["not taken by jax: " + type(error).__name__] += 1
            examples["not taken by jax: " + type(error).__name__].append((seed, made, str(error)[:100]))
            continue
        signal.alarm(6 * SECONDS)
        try:
            faults = faults_of(fn, PARAMS, X)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            faults = [f"{type(error).__name__} in {Path(at.filename).name} {at.lineno}: {error}"]
        signal.alarm(0)
        for fault in faults or ["right"]:
            kind = fault.partition(":")[0]
            kinds[kind] += 1
            examples[kind].append((seed, made, fault))
        if options.seeds:
            print(seed, made, *faults, sep="\n    ")
    for kind, number in kinds.most_common():
        print(f"{number:5} {kind}")
        if kind != "right":
            for seed, made, fault in sorted(examples[kind], key=lambda each: len(each[1]))[:6]:
                print(f"          {seed}: {fault}    {', '.join(made)}")
    print(f"{len(seeds)} programs, {time.time() - began:.0f} seconds")


if __name__ == "__main__":
    main()
