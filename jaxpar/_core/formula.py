"""Which of several formulas for the same result a model takes."""

from __future__ import annotations

import jax

as_written = jax.make_user_context(default_value=False)
"""`with as_written(True):` models compute as they are written down in papers, on every platform; a model may take
other formulas for the same result where they are faster. Pictures and counts of a model are made so. Programs that
`jax.jit` compiled outside of the context are not used inside it, nor the other way round."""
