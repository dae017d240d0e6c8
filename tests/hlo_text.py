"""Programs of XLA as text, for tests: what the compilers for devices that are not there write."""

try:
    from jaxlib._hlo import hlo_module_from_text
except ImportError:  # jaxlib 0.10
    from jaxlib._jax import hlo_module_from_text

from jaxpar.viz._program.hlo import parse


def program_from(text):
    """The program of a text, in the order in which it is written."""
    return parse(hlo_module_from_text(text).as_serialized_hlo_module_proto())
