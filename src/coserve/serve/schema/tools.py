"""Tools in `/v1/chat/completions`: those that an answer may call, and calls of them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from coserve.serve.answering.cost import LONGEST_NAME, MOST_BODY_BYTES, MOST_TOOLS
from coserve.serve.schema.common import JsonObject, RequestBody, Schema, Words
from coserve.text.tools.syntax import TOOL_NAME
from coserve.text.tools.tool import Tool

ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
CallId = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class FunctionDefinition(RequestBody):
    """A function that an answer may call."""

    name: ToolName
    description: Words | None = None
    parameters: Schema | None = Field(
        None, description="The JSON schema of its arguments, which are an object."
    )
    strict: bool | None = Field(
        None,
        description="Arguments always match the schema; strict refuses a schema with keywords that cannot be "
        "enforced, which are left out otherwise.",
    )


class FunctionTool(RequestBody):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: FunctionDefinition
    _given: JsonObject = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler["FunctionTool"]) -> "FunctionTool":
        made = handler(value)
        made._given = value
        return made

    @property
    def shown(self) -> JsonObject:
        """The tool as the template shows it, as it does in training: with its keys in the order they came
        in."""
        given = self._given["function"]
        return {
            "type": "function",
            "function": {key: value for key, value in given.items() if value is not None},
        }

    @property
    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.parameters or {}, bool(function.strict))


class NamedFunction(RequestBody):
    name: ToolName


class NamedTool(RequestBody):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestBody):
    """Some of the tools, which an answer may call or has to."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


class AllowedToolChoice(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]
)


class FunctionCall(RequestBody):
    """A function with its arguments, as JSON."""

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    arguments: Annotated[str, Field(max_length=MOST_BODY_BYTES)]


class ToolCallParam(RequestBody):
    """A call that an earlier answer made."""

    id: CallId
    type: Literal["function"]
    function: FunctionCall


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCallMade(BaseModel):
    """A call of a tool. Its arguments are JSON, but for an answer that was cut off within them."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
