"""Whether a download can begin at all: one short question, where TFDS would retry for minutes."""

from __future__ import annotations

import threading


def probe(url: str, seconds: float = 5.0) -> None:
    """Asks for `url` once, as TFDS does (proxies of the environment too), and reads no body.

    It runs in a thread of its own because a name look-up cannot be given a time limit.

    Raises:
      ConnectionError: no answer within `seconds`, or one that is no success.
    """
    import requests

    answer: list[str] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            with requests.get(url, stream=True, timeout=seconds) as response:
                answer[0] = "" if response.ok else f"HTTP status {response.status_code}"
        except requests.RequestException as error:
            answer[0] = f"the host cannot be reached ({type(error).__name__})"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if answer[0]:
        raise ConnectionError(f"cannot download {url}: {answer[0]}")
