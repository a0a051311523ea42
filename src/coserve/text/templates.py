"""Chat templates, rendered as transformers' `apply_chat_template` does; called in a sandbox (`rendering.py`).

A template is a program from a model's folder, and may run for hours on a chat of a few words. transformers'
own renderer takes 1.1 s and 66 MB to be imported, this one 0.1 s and 20 MB; a test compares them.
"""

import json
import secrets
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from coserve.errors import DataError, TurnsRewritten
from coserve.text.told_tools import CALLED, NAME, TOOLS, told

Turns = list[dict[str, Any]]
Rendered = tuple[str, list[tuple[int, int]]]
_SPECIAL: Final = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def render(
    what: str,
    template: str,
    special: dict[str, Any],
    turns: Turns,
    tools: list[dict[str, Any]] | None,
    *more: Any,
) -> Rendered:
    """Renders a chat to its text, and some spans (start, end) of it in characters. `special` has the
    tokenizer's special tokens by name, and a request's own variables; `what` is

    - "request": the chat with the generation prompt, no spans;
    - "continued": the chat up to the end of its last message's content, no spans;
    - "marked": the chat with the spans that the template marks;
    - "prefixes" with (learned, eos): the chat with the spans of the assistant's turns that are learned.

    Tools, and calls of them, that the template leaves out are told in words. Raises DataError.
    """
    has_calls = any("tool_calls" in turn for turn in turns)
    if _is_told(template, bool(tools), has_calls):
        turns, tools = told(turns, tools or []), None
    else:
        if has_calls and _writes_ids(template):
            turns = _with_named_ids(turns)
        if any(map(_explains_call, turns)) and _refuses_explained_calls(template):
            turns = [_with_one_text(turn) if _explains_call(turn) else turn for turn in turns]
        if tools and _refuses_undescribed(template):
            tools = [_with_description(tool) for tool in tools]
    chat = _Chat(template, special, turns, tools)
    if what == "request":
        return chat.text(turns, True), []
    if what == "continued":
        return chat.continued(), []
    if what == "marked":
        return chat.marked()
    return chat.prefixes(*more)


class _Chat:
    def __init__(
        self, template: str, special: dict[str, Any], turns: Turns, tools: list[dict[str, Any]] | None
    ) -> None:
        self._template, self._special = template, special
        self._turns, self._tools = turns, tools

    def text(self, turns: Turns, asks: bool) -> str:
        return self._render(turns, self._tools, asks)[0]

    def marked(self) -> Rendered:
        return self._render(self._turns, self._tools, False, marks=True)

    def continued(self) -> str:
        """The chat up to the end of the content of its last message, where that goes on."""
        mark = secrets.token_hex(16)
        last = self._turns[-1]
        text = self.text([*self._turns[:-1], {**last, "content": last["content"] + mark}], False)
        before, found, _ = text.rpartition(mark)
        if not found:
            raise DataError("the chat template leaves out the last message, so it cannot be continued")
        return before

    def prefixes(self, learned: list[bool], eos: str | None) -> Rendered:
        """The chat, and spans of the assistant's turns that are learned, end-of-turn marks included: what a
        turn adds to the chat before it with the generation prompt."""
        turns, text, spans = self._turns, self.text(self._turns, False), list[tuple[int, int]]()
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant" or not learned[i]:
                continue
            asked, answered = self.text(turns[:i], True), self.text(turns[: i + 1], False)
            if not (text.startswith(answered) and answered.startswith(asked)):
                raise TurnsRewritten(
                    f"the chat template renders message {i + 1} differently once more of the chat follows, "
                    "so the assistant's tokens cannot be told apart; mark them with {% generation %} in the "
                    "template"
                )
            spans.append((len(asked), end_of(answered, eos)))
        return text, spans

    def _render(
        self, turns: Turns, tools: list[dict[str, Any]] | None, asks: bool, marks: bool = False
    ) -> Rendered:
        try:
            if not turns:
                raise ValueError("it has no messages")
            template = _compiled(self._template)
            given = {
                **self._special,
                "messages": [_with_reasoning(turn) for turn in turns],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": asks,
            }
            if not marks:
                return str(template.render(given)), []
            tracker: _Generation = template.environment.extensions[_Generation.identifier]
            return tracker.rendered(template, given)
        except Exception as error:
            # It raises what it likes, mostly a sentence on the roles it takes; all of it is about this chat.
            raise DataError(f"the chat template refuses this chat: {error}") from error


def _is_told(template: str, has_tools: bool, has_calls: bool) -> bool:
    """Tells whether tools and calls are told in words."""
    if not (has_tools or has_calls):
        return False
    leaves_out_tools, leaves_out_calls = _left_out(template)
    return leaves_out_calls or (has_tools and leaves_out_tools)


@lru_cache(16)
def _left_out(template: str) -> tuple[bool, bool]:
    """Tells whether a template renders the same text without the tools of a chat, and without a call, or
    refuses it."""
    turns, tools = [dict(turn) for turn in CALLED], [dict(tool) for tool in TOOLS]
    silent = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
    chat = _Chat(template, _SPECIAL, turns, tools)
    try:
        text = chat.text(turns, False)
        without_tools = _Chat(template, _SPECIAL, turns, None).text(turns, False)
    except DataError:
        return True, True
    try:
        return text == without_tools, text == chat.text(silent, False)
    except DataError:
        return text == without_tools, False  # a template that misses the call reads it


@lru_cache(16)
def _writes_ids(template: str) -> bool:
    """Tells whether a template writes the id of a call in place of its name, as Kimi K2's does."""
    turns = [dict(turn) for turn in CALLED]
    try:
        text = _Chat(template, _SPECIAL, turns, None).text(turns, False)
    except DataError:
        return False
    return NAME not in text and CALLED[1]["tool_calls"][0]["id"] in text


def _with_named_ids(turns: Turns) -> Turns:
    """The chat with ids that name the function, and number the call: the only ones that such a model
    knows."""
    found, ids = Turns(), dict[Any, str]()
    count = 0
    for turn in turns:
        if "tool_calls" in turn:
            calls = []
            for call in turn["tool_calls"]:
                ids[call.get("id")] = id = f"functions.{call['function']['name']}:{count}"
                calls.append({**call, "id": id})
                count += 1
            turn = {**turn, "tool_calls": calls}
        elif turn.get("tool_call_id") in ids:
            turn = {**turn, "tool_call_id": ids[turn["tool_call_id"]]}
        found.append(turn)
    return found


def _explains_call(turn: dict[str, Any]) -> bool:
    """Tells whether a turn has a call, reasoning and content."""
    return bool(turn.get("tool_calls") and turn.get("content") and _with_reasoning(turn).get("thinking"))


@lru_cache(16)
def _refuses_explained_calls(template: str) -> bool:
    """Tells whether a template refuses such a turn, but takes one without content, as GPT-OSS' does."""
    question, called = (dict(turn) for turn in CALLED)
    thought = {**called, "reasoning_content": NAME}
    return _takes(template, [question, thought]) and not _takes(
        template, [question, {**thought, "content": NAME}]
    )


@lru_cache(16)
def _refuses_undescribed(template: str) -> bool:
    """Tells whether a template refuses tools without a description, but takes others, as GPT-OSS' does."""
    turns, tools = [dict(turn) for turn in CALLED[:1]], [dict(tool) for tool in TOOLS]
    return _takes(template, turns, tools) and not _takes(
        template, turns, [_undescribed(one) for one in tools]
    )


def _takes(template: str, turns: Turns, tools: list[dict[str, Any]] | None = None) -> bool:
    try:
        _Chat(template, _SPECIAL, turns, tools).text(turns, False)
    except DataError:
        return False
    return True


def _undescribed(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: each for key, each in tool["function"].items() if key != "description"}
    return {**tool, "function": function}


def _with_description(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with a description, if only an empty one."""
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _with_one_text(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with what was said before its call at the end of its reasoning."""
    content = turn["content"]
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    thought = f"{_with_reasoning(turn)['thinking']}\n{content}"
    own = {key: value for key, value in turn.items() if key not in ("thinking", "reasoning")}
    return {**own, "content": "", "reasoning_content": thought}


def end_of(answered: str, eos: str | None) -> int:
    """Place in a chat at which its last answer is over."""
    # With its end mark: no one samples the line break after it.
    whole = answered.rstrip()
    return len(whole) if eos and whole.endswith(eos) else len(answered)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part of a chat. For one thread."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._blocks: list[str] | None = None  # of the text so far, where marks are wanted
        self._spans: list[tuple[int, int]] = []

    def rendered(self, template: Any, given: dict[str, Any]) -> Rendered:
        """The text of a template, and the spans that it marks."""
        self._blocks, self._spans = [], []
        try:
            for block in template.generate(given):
                self._blocks.append(block)
            return "".join(self._blocks), self._spans
        finally:
            self._blocks = None

    def parse(self, parser: Parser) -> Node:
        """See jinja2."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, _: EvalContext, caller: Macro) -> str:
        text: str = caller()
        if self._blocks is not None:
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(text)))
        return text


class _Dict:
    """`dict` without a class that a template could get at."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """As Python's."""
        return dict.fromkeys(*arguments)


class _Variables(Namespace):
    """`namespace`, whose attributes are no part of Python's own."""

    def __init__(*arguments: Any, **named: Any) -> None:  # one of them may be called "self"
        self, *given = arguments
        values = dict(*given, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace may not begin with an underscore, as {name!r} does")


@lru_cache(16)
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda format: datetime.now().strftime(format),
        dict=_Dict(),
        namespace=_Variables,
    )
    return environment.from_string(template)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with its reasoning, if it has one, under the names that templates know it by."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        if turn.get(key) is not None:
            return {"thinking": turn[key], **turn, "reasoning_content": turn[key]}
    return turn
