"""For the documentation site: links to files outside of it, such as a test, become their names; printed tables scroll.

On a page of the repository such links lead to the file.
"""

import re
from typing import Any

# [text](../tests/...), where the text is code.
OUTSIDE = re.compile(r"\[(`[^`]+`)\]\(\.\./(tests/[^)]+)\)")

# What a program printed, and a line of it with three columns. Other printed lines are folded on a narrow screen.
PRINTED = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = re.compile(r"^.*\S {3,}\S+(?: \S+)* {3,}\S", re.MULTILINE)


def on_page_markdown(markdown: str, **context: Any) -> str:
    """The hook of MkDocs: the text of a page before it is made HTML."""
    return PRINTED.sub(_scrolled_where_a_table, OUTSIDE.sub(r"\1 in `\2`", markdown))


def _scrolled_where_a_table(block: re.Match[str]) -> str:
    is_table = len(COLUMNS.findall(block[1])) >= 3
    return f"```{{.text .columns}}\n{block[1]}```" if is_table else block[0]
