"""Shows the examples in docstrings (``>>> ``) as code; Markdown would take their lists for links."""

import re

from griffe import Class, Docstring, Extension, Function, Module, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*\n).*)*", re.MULTILINE)


class Doctests(Extension):
    """Fences every block of examples."""

    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        """Rewrites a docstring as it is loaded."""
        if isinstance(obj, (Class, Function, Module)) and isinstance(obj.docstring, Docstring):
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
