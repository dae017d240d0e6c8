"""For the documentation site: links to files outside of it, such as a test, become their names.

On a page of the repository they lead to the file.
"""

import re
from typing import Any

# [text](../tests/...), where the text is code.
OUTSIDE = re.compile(r"\[(`[^`]+`)\]\(\.\./(tests/[^)]+)\)")


def on_page_markdown(markdown: str, **context: Any) -> str:
    """The hook of MkDocs: the text of a page before it is made HTML."""
    return OUTSIDE.sub(r"\1 in `\2`", markdown)
