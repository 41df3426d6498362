"""What every description shares: frozen, closed to unknown keys, the sentence under a field its documentation and its JSON Schema text.

pydantic can read those sentences itself (`use_attribute_docstrings`), but does so when a class is made, from its source: a quarter of the
time that a plan may take. Here they are read when a schema is asked for.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Description(BaseModel):
    """A value that describes one thing. Ask for a changed copy; nothing is edited in place."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def model_json_schema(cls, *args: Any, **keywords: Any) -> dict[str, Any]:
        """Return pydantic's JSON Schema with the sentences under the fields."""
        schema = super().model_json_schema(*args, **keywords)
        by_name = {model.__name__: model for model in _all_models(Description)}
        for name, definition in (*schema.get("$defs", {}).items(), (cls.__name__, schema)):
            if name in by_name:
                _describe(definition, by_name[name])
        return schema


def _all_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _all_models(child)


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Put the sentence under each field of *model*, and of what it inherits from, into its part of a schema."""
    for ancestor in reversed(model.__mro__):
        if issubclass(ancestor, BaseModel) and ancestor is not BaseModel:
            for field, sentence in field_sentences(ancestor).items():
                if field in definition.get("properties", {}):
                    definition["properties"][field]["description"] = sentence


def field_sentences(model: type) -> dict[str, str]:
    """Return the sentence under each field that *model* itself declares."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for declaration, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(declaration, ast.AnnAssign) and isinstance(declaration.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                sentences[declaration.target.id] = inspect.cleandoc(text)
    return sentences
