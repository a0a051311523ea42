"""Forms of answers, by vLLM's names: `structured_outputs`, and the older `guided_*`."""

from typing import Annotated, Any, Final

import msgspec
from pydantic import Field, model_validator

from coserve.serve.answering.cost import MOST_GRAMMAR_BYTES
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.serve.schema.common import Generation, RequestBody, Schema

MOST_OPTIONS: Final = 1024
_KINDS: Final = ("json", "regex", "choice", "grammar")
_Text = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_BYTES)]
Options = Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MOST_OPTIONS)]


class StructuredOutputs(RequestBody):
    """One form of the whole answer. `grammar` is Lark, or llama.cpp's GBNF."""

    json_: Schema | _Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: _Text | None = None
    choice: Options | None = None
    grammar: _Text | None = None


class StructuredGeneration(Generation):
    """A request whose answers may be held to a form."""

    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the whole answer has to be (vLLM's name)."
    )
    guided_json: Schema | _Text | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: _Text | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Options | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: _Text | None = Field(None, description="The older name of structured_outputs.grammar.")

    @model_validator(mode="after")
    def _ends_by_itself(self) -> "StructuredGeneration":
        if self.structure is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("min_tokens and ignore_eos are not allowed where an answer's form says its end")
        return self

    @property
    def structure(self) -> Structure | None:
        """The form of answers, if one is asked for. Raises ApiError for several."""
        new = self.structured_outputs
        asked: list[tuple[str, Any, str]] = [
            (kind, getattr(self, f"guided_{kind}"), f"guided_{kind}") for kind in _KINDS
        ]
        if new is not None:
            values = {"json": new.json_, "regex": new.regex, "choice": new.choice, "grammar": new.grammar}
            asked += [(kind, values[kind], f"structured_outputs.{kind}") for kind in _KINDS]
            if new.json_object:
                asked.append(("json", {"type": "object"}, "structured_outputs.json_object"))
        found = [one for one in asked if one[1] is not None]
        if len(found) > 1 or (new is not None and not any(one[2].startswith("str") for one in found)):
            message = f"Exactly one form of the answer may be asked for, not {len(found)}."
            param = "structured_outputs" if new is not None else found[0][2]
            raise ApiError(400, message, param=param, code="invalid_value")
        if not found:
            return None
        kind, value, param = found[0]
        structure = Structure(kind, value, param)  # type: ignore[arg-type]
        if kind == "json" and isinstance(value, str):
            try:
                return Structure("json", msgspec.json.decode(value, type=dict[str, Any]), param)
            except (msgspec.DecodeError, RecursionError) as error:
                raise structure.bad(f"it is no JSON object: {error}") from error
        return structure
