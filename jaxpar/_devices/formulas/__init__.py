"""Convolutions, products and pooling by the formulas that are fastest on CPUs.

Each is a primitive that is lax's own but for the way it is lowered on CPUs. `fast_on_cpus` puts them in the place of
lax's in a function of anyone's.
"""

from .convolution import CONVOLUTION_IN_LOOP as CONVOLUTION_IN_LOOP, bind_convolution as bind_convolution
from .pooling import MOST_PLACES as MOST_PLACES, Windows as Windows, views as views
from .replace import fast_on_cpus as fast_on_cpus
