"""Docstrings of this project as Markdown: an extension of griffe (mkdocs.yml names it).

A docstring explains arguments and attributes in its text, `name: what it is.`, several in a paragraph. Where `name` is
one of the signature or of the class, or an axis of a job that the function takes, the site shows a list with an item
each; a sentence that begins with "Raises" or "Returns" begins a paragraph.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function

from pstar_sim.workload.axes import all_axes

END = re.compile(r"(?<=[.)!?\"`])[ \n](?=(?:Raises|Returns) )")


class Docstrings(Extension):
    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        if func.docstring is not None:
            names = {p.name for p in func.parameters}
            func.docstring.value = as_lists(
                func.docstring.value, names | all_axes().keys() if "axes" in names else names
            )

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        if cls.docstring is not None:
            made = cls.members.get("__init__")
            names = {p.name for p in made.parameters} if isinstance(made, Function) else set()
            cls.docstring.value = as_lists(cls.docstring.value, {*cls.members} | names)


def as_lists(text: str, names: set[str]) -> str:
    """The text with explanations of these names as items of a list."""
    word = r"[a-z_][a-z0-9_]*"
    begins = re.compile(rf"(?:\A|(?<=[.)!?\"`]) |\n)({word}(?:(?:,| and) {word})*):[ \n]")
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = re.sub(r"\n +", " ", paragraph)  # a line that belongs to the one before it
        parts = begins.split(joined)
        items, lead = [], [parts[0]]
        for said, rest in zip(parts[1::2], parts[2::2]):
            if all(name in names for name in re.split(r",? and |, ", said)):
                items.append(f"- {', '.join(f'`{name}`' for name in re.split(r',? and |, ', said))}: {rest.strip()}")
            elif items:
                items[-1] += f" {said}: {rest.strip()}"
            else:
                lead.append(f" {said}: {rest}")
        ends = END.split(items[-1], maxsplit=1) if items else []
        if len(ends) > 1:
            items[-1] = ends[0]
        shown = [END.sub("\n\n", "".join(lead).strip()), "\n".join(items), *ends[1:]]
        paragraphs += [part for part in shown if part] if items else [END.sub("\n\n", paragraph)]
    return "\n\n".join(paragraphs)
