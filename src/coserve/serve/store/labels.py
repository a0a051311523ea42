"""Conditions on columns of metadata, whose names and values are clients'."""

from typing import Any

from sqlalchemy import ColumnElement, Text, cast, literal, or_
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction


class _LabelOf(GenericFunction[str]):
    """The text of one entry of a JSON object: its name is data, not a path."""

    type = Text()
    inherit_cache = True


@compiles(_LabelOf, "sqlite")
def _in_sqlite(element: _LabelOf, compiler: SQLCompiler, **more: Any) -> str:
    column, name = (compiler.process(one, **more) for one in element.clauses)
    return f"(SELECT value FROM json_each({column}) WHERE key = {name})"


@compiles(_LabelOf, "postgresql")
def _in_postgres(element: _LabelOf, compiler: SQLCompiler, **more: Any) -> str:
    column, name = (compiler.process(one, **more) for one in element.clauses)
    return f"json_extract_path_text({column}, {name})"


def has_label(column: Any, name: str, value: str) -> ColumnElement[bool]:
    """Tells whether an object has an entry of this name and value."""
    return _LabelOf(column, literal(name, Text)) == value


def has_no_labels(column: Any) -> ColumnElement[bool]:
    """Tells whether an object is missing or empty."""
    return or_(column.is_(None), cast(column, Text) == "{}")
