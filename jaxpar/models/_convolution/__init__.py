"""A convolution whose gradients are fast on CPUs.

`primitive` is closed under differentiation and batching, `problem` reads one convolution, `formulas` computes it.
"""

from .public import conv_general_dilated as conv_general_dilated
