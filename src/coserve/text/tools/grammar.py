"""The grammar of answers that may, or must, call tools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coserve.errors import DataError
from coserve.text.reasoning import CLOSING, OPENING
from coserve.text.tools.format import ToolFormat
from coserve.text.tools.harmony import channel_grammar
from coserve.text.tools.lark import Lark
from coserve.text.tools.syntax import ANY_NUMBER, NAME, NUMBER, pattern_of
from coserve.text.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of an answer: calls of `tools` in a `format`, several only where they are `parallel`; or,
    where calls are not `forced`, text, or else what the expression `answer` matches. It `has_reasoning`
    before it, of which the prompt has the opening mark where that is open (`is_thinking`). An answer in
    channels begins within the message of a `channel`, or before one where that is empty."""

    format: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    forced: bool = False
    parallel: bool = True
    answer: str | None = None
    has_reasoning: bool = False
    is_thinking: bool = False
    channel: str | None = None


def answer_grammar(wanted: AnswerParts, lark: Lark) -> str:
    """The grammar of an answer. Raises DataError, naming the tool, for a schema that its format cannot
    hold."""
    if wanted.channel is not None:
        calls = zip(wanted.tools, _arguments(wanted, lark), strict=True)
        return channel_grammar(lark, [*calls], wanted.channel, wanted.answer, wanted.forced)
    body = _body(wanted, lark)
    if not wanted.has_reasoning:
        return lark.written(body)
    after = lark.until("reasoning", CLOSING)
    line = '"\\n"*'
    if wanted.is_thinking:
        # An answer that ends within its reasoning is one where nothing else is asked for.
        unfinished = "" if _is_held(wanted) else f" | {lark.free('unfinished', CLOSING)}"
        return lark.written(f"{after} {line} ({body}){unfinished}")
    if wanted.forced:
        return lark.written(body)
    return lark.written(f"({lark.literal(OPENING)} {after} {line})? ({body})")


def _is_held(wanted: AnswerParts) -> bool:
    return wanted.forced or wanted.answer is not None


def _body(wanted: AnswerParts, lark: Lark) -> str:
    format = wanted.format
    answer = None if wanted.answer is None else lark.rule("answer", wanted.answer)
    if format is None:
        return answer or lark.free("text")
    calls = _calls(wanted, format, lark)
    syntax = format.syntax
    begun = f"{lark.literal(syntax.marker)} {calls}"
    if wanted.forced:
        return begun
    if answer is not None:
        return f"{answer} | {begun}"
    if syntax.anywhere:
        return f"{lark.free('text', syntax.marker)} | {lark.until('before', syntax.marker)} {calls}"
    not_first = pattern_of((syntax.opening + syntax.before).partition(NAME)[0])
    return f"{lark.free('text', not_first=not_first)} | {begun}"


def _calls(wanted: AnswerParts, format: ToolFormat, lark: Lark) -> str:
    """A rule for all calls, without the marker that the first one begins with."""
    syntax = format.syntax
    firsts, nexts = list[str](), list[str]()
    for index, (tool, arguments) in enumerate(zip(wanted.tools, _arguments(wanted, lark), strict=True)):
        rest = lark.rule(f"call_{index}", f"{arguments} {lark.literal(syntax.after)}".rstrip())
        first = (syntax.opening + syntax.before).removeprefix(syntax.marker).replace(NAME, tool.name)
        # A line break or a space after the marker is often one token with it, or none is there.
        space = first[: len(first) - len(first.lstrip())]
        begin = f"{lark.literal(space)}? {_written(first.lstrip(), lark)}" if space else _written(first, lark)
        firsts.append(f"{begin} {rest}")
        nexts.append(f"{_written(syntax.between + syntax.before.replace(NAME, tool.name), lark)} {rest}")
    body = lark.rule("first_call", " | ".join(firsts))
    if wanted.parallel:
        body += f" ({lark.rule('next_call', ' | '.join(nexts))})*"
    return lark.rule("calls", f"{body} {lark.literal(syntax.closing)}".rstrip())


def _arguments(wanted: AnswerParts, lark: Lark) -> Iterator[str]:
    """Expressions for the arguments of each tool."""
    for index, tool in enumerate(wanted.tools):
        assert wanted.format is not None, "tools are called in a format"
        try:
            yield wanted.format.grammar(lark, tool)
        except DataError as error:
            raise DataError(f"tools[{index}], {tool.name!r}: {error}") from error


def _written(text: str, lark: Lark) -> str:
    """An expression for a literal in which any number may stand for the call's."""
    return f" /{ANY_NUMBER}/ ".join(map(lark.literal, text.split(NUMBER)))
