"""A tool that an answer may call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function by its name, with the JSON schema of its `parameters`, which are an object. Where it is
    `strict`, a keyword of the schema that cannot be enforced is an error; else it is left out."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def type_of(self, parameter: str) -> str | None:
        """The JSON type of a parameter, also of one whose values are listed; None where its schema names
        none, or several."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        if not isinstance(schema, Mapping):
            return None
        found = schema.get("type")
        if found is None and ("const" in schema or "enum" in schema):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
                return "string"
        return found if isinstance(found, str) else None
