"""The known patterns, in the order in which they are tried."""

from __future__ import annotations

from .._patterns import activations, attention, layers, losses, mixing, norms, pooling, recurrent, rotary
from .patterns import COLLECTIVES, Rule

RULES: tuple[Rule, ...] = (
    Rule("normalization", frozenset(), norms.normalization),
    Rule("rotary embedding", frozenset(("Concat", "stack", "concatenate", "add")), rotary.rotary),
    Rule("convolution and its bias", frozenset(("conv",)), layers.convolution),
    Rule("matrix product with a parameter, and its bias", frozenset(("MatMul",)), layers.fully_connected),
    Rule("softmax", frozenset(("div", "mul")), attention.softmax),
    Rule("attention", frozenset(("Softmax",)), attention.attention),
    Rule("cache of attention", frozenset(("Attention",)), attention.cache),
    Rule("rows of a table", frozenset(), layers.embedding),
    Rule("windows reduced", frozenset(), pooling.window_pooling),
    Rule("slices added and scaled", frozenset(("add", "maximum")), pooling.slice_pooling),
    Rule("axes split and reduced", frozenset(("sum", "mean", "max")), pooling.reshape_pooling),
    Rule("activation written out", frozenset(), activations.inline_activation),
    Rule("activation", frozenset(("maximum", "tanh", "logistic")), layers.activation),
    Rule("mean", frozenset(("sum",)), losses.mean),
    Rule("squared error", frozenset(("sub",)), losses.squared_error),
    Rule("cross-entropy", frozenset(("LogSoftmax", "logsumexp")), losses.cross_entropy),
    Rule("reduction of a loss", frozenset(("Loss",)), losses.reduction),
    Rule("kernel", frozenset(("pallas_call",)), layers.pallas),
    Rule("Fourier transform", frozenset(), layers.transform),
    Rule("flatten", frozenset(("Flatten",)), layers.flatten),
    Rule("strided slices joined", frozenset(("Concat",)), pooling.space_to_depth),
    Rule("concatenate", frozenset(("Concat", "stack")), layers.concat),
    Rule("collective", COLLECTIVES, layers.collective),
    Rule("bias added late", frozenset(("add",)), layers.late_bias),
    Rule("LSTM", frozenset(("mul",)), recurrent.lstm),
    Rule("GRU", frozenset(("add",)), recurrent.gru),
    Rule("routing to experts", frozenset(("top_k",)), mixing.routing),
    Rule("selective scan", frozenset(("AssociativeScan",)), mixing.selective_scan),
    Rule("constant factor", frozenset(("mul", "div", "add", "sub", "neg")), layers.scale),
)
