"""Qwen3-Coder: `<function=name>` and its parameters, within `<tool_call>`."""

from typing import Final

from coserve.text.tools.syntax import NAME, Syntax
from coserve.text.tools.xml_calls import ParameterSyntax, XmlCalls

QWEN3_CODER: Final = XmlCalls(
    "qwen3_coder",
    Syntax(before=f"<tool_call>\n<function={NAME}>", after="\n</tool_call>", between="\n"),
    ParameterSyntax(f"<parameter={NAME}>", "</parameter>", "</function>", has_lines=True),
)
