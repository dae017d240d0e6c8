"""Threads that never end in silence.

The classes of this package have a thread instead of being one: `threading.Thread` keeps private attributes, and a new
release of Python may give one of them the name of a method of ours.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from .._core.text import say_before_exit


def daemon(
    name: str, run: Callable[[], None], consequence: str, end: Callable[[], object] | None = None
) -> threading.Thread:
    """A thread that does not keep the process alive. It is not started.

    An exception ends it, with its trace and one line that names the consequence. Then `end` is called.
    """

    def watched() -> None:
        try:
            run()
        except Exception as error:
            what = f"the thread {name} failed: {type(error).__name__}: {error}"
            say_before_exit(f"{traceback.format_exc()}jaxpar: {what}; {consequence}")
            if end is not None:
                end()

    return threading.Thread(target=watched, name=name, daemon=True)
