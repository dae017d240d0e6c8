"""Random symbols with names and numbers that are hard to write as Python. Each value has the shape (4, 4)."""

import keyword

from symbols import Symbol

SHAPE = (4, 4)
NAMES = [
    *("", " ", "_", "__", "x", "x1", "x20", "y", "n", "key", "name", "net", "params", "array", "inputs", "dict", "zip"),
    *("range", "len", "tuple", "apply", "init", "load", "split", "dense", "mx_lrn", "residual", "block", "jnp", "math"),
    *(
        "__debug__",
        "self",
        "rngs",
        "a-b",
        "a_b",
        "a b",
        "a.b",
        "1st",
        "007",
        "données",
        "日本",
        "٣",
        "²",
        "ﬁ",
        "\ud800",
    ),
    *("it's", 'say "x"', "'''", '"""', "\\", "\\N{BULLET}", "a\nb", "a\0b", "{v[0]}", "{{", "#", "a, b)", "f(", ")("),
    *("w" * 95, "long " * 30, "(" * 100, ", " * 60, "7" * 30, "7" * 5000, "a1b02", "True", "None", "a" * 3000),
    *keyword.kwlist[:6],
]
NUMBERS = ["inf", "-inf", "nan", "-0.0", "0", "1", "-1", "2.5", "-3e-5", "1e38", "1e39", "0.1", "100000000"]


def random_symbol(random, count):
    """The nodes, the heads, and names: of inputs, params and running statistics."""
    net, values, sorts = Symbol(), [], {"data": [], "arg": [], "aux": []}
    names = [NAMES[i] for i in random.permutation(len(NAMES))]

    def name():
        return names.pop() if names and random.randint(3) else f"n{len(net.nodes)}"

    def variable(sort, ending="", **attrs):
        own = name() + ending
        while own in net.numbers:
            own += "1"
        sorts[sort].append(own)
        return net.var(own, **attrs)

    def param():
        return variable("arg", __init__="zero", __shape__=SHAPE)

    def value():
        return values[random.randint(max(0, len(values) - 4), len(values))]

    values += [net.add("identity", name(), variable("data")) for _ in range(random.randint(1, 4))]
    for _ in range(count):
        scalar = NUMBERS[random.randint(len(NUMBERS))]
        number = len(net.nodes)
        match random.randint(16):
            case 0 | 1:
                op = ["_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_rdiv_scalar"]
                made = net.add(op[random.randint(6)], name(), value(), scalar=scalar)
            case 2:
                made = net.add("_maximum_scalar", name(), value(), scalar=scalar)
            case 3:
                made = net.add("LeakyReLU", name(), value(), act_type=("leaky", "elu")[random.randint(2)], slope=scalar)
            case 4 | 5:
                op = ["elemwise_add", "broadcast_mul", "_Minus", "broadcast_div", "_maximum", "_Maximum"]
                made = net.add(op[random.randint(6)], name(), value(), value())
            case 6 | 7:
                act = ("relu", "tanh", "sigmoid", "softrelu")[random.randint(4)]
                made = net.add("Activation", name(), value(), act_type=act)
            case 8 | 9:
                arrays = [variable("arg", f"{random.randint(99)}_{end}") for end in ("weight", "bias")]
                made = net.add("FullyConnected", name(), value(), *arrays, num_hidden=4, flatten=random.randint(2) == 1)
            case 10:
                own = net.add("FullyConnected", name(), value(), "shared_weight", "shared_bias", num_hidden=4)
                sorts["arg"] += [n for n in ("shared_weight", "shared_bias") if n not in sorts["arg"]]
                made = own
            case 11:
                arrays = [variable("arg", "_gamma"), variable("arg", "_beta"), variable("aux"), variable("aux")]
                several = random.randint(3) == 0
                made = net.add("BatchNorm", name(), value(), *arrays, output_mean_var=several)
            case 12:
                own = net.add("SliceChannel", name(), value(), num_outputs=2)
                made = net.add("Concat", name(), (own, random.randint(2)), (own, 1), dim=1)
            case 13:
                made = net.add("elemwise_add", name(), value(), param())
            case 14:
                made = net.add("Dropout", name(), value(), p=0.5)
            case 15:
                shifted = net.add("transpose", name(), f"label{number}")
                op = ("SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput")[random.randint(3)]
                made = net.add(op, name(), value(), shifted)
        values.append(made)
    used = {place[0] for made in net.nodes for place in made["inputs"]}
    heads = [[number, 0, 0] for number, made in enumerate(net.nodes) if number not in used and made["op"] != "null"]
    heads += [[values[random.randint(len(values))], 0, 0] for _ in range(random.randint(3))]
    if random.randint(4) == 0:
        heads.append([param(), 0, 0])
    return net.nodes, heads, sorts
