"""What CPUs compute faster than XLA does: convolutions, products over several axes, pooling, LSTM, sums of many layers.

    replace        the hook: `fast_on_cpus` puts the primitives of this room in the place of lax's; blocks of memory
    primitive      makes such a primitive: lax's own but for its lowering on CPUs
    shares         convolutions and loops in a program that XLA splits over a mesh
    problem        one description of a convolution
    convolution    chooses a kernel or a formula for each convolution
    kernels        calls the kernels in C++ of jaxpar-cpu, where it is installed
    cells          finds the loops of an LSTM and of a GRU
    recurrent      these loops, for the kernels of jaxpar-cpu
    products       convolutions as products of matrices, and products over several axes
    winograd       windows of 3 x 3 with less than half of the multiplications
    grouped        depthwise convolutions and groups
    pooling        pooling and its gradients as slices
    sums           sums that several layers read, computed once
    lenet_layers   the two convolutions of LeNet, with the batch as the last axis

A program for other devices is not changed: `for_platform` returns its function as it is.
"""

from .convolution import conv_general_dilated as conv_general_dilated
from .pooling import avg_pool as avg_pool, max_pool as max_pool
from .replace import (
    fast_loops as fast_loops,
    fast_on_cpus as fast_on_cpus,
    for_platform as for_platform,
    in_blocks as in_blocks,
    is_slow_in_a_loop as is_slow_in_a_loop,
)
