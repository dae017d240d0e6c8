"""For the documentation site: the doctests of docstrings as code blocks. (As plain Markdown, >>> is a quotation.)"""

import re

import griffe

# A prompt and all lines up to the next empty one, of one indentation.
DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **options: object) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", obj.docstring.value
            )
