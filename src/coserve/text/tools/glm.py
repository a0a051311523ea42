"""GLM 4.5 and 4.6: the name, and pairs of keys and values, within `<tool_call>`."""

from typing import Final

from coserve.text.tools.syntax import NAME, TOOL_NAME, Syntax
from coserve.text.tools.xml_calls import ParameterSyntax, XmlCalls

GLM: Final = XmlCalls(
    "glm45",
    Syntax(
        before=f"<tool_call>{NAME}",
        after="",
        between="\n",
        reads_before=rf"<tool_call>\s{{0,16}}(?P<name>{TOOL_NAME})\n",
    ),
    ParameterSyntax(
        f"<arg_key>{NAME}</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>", has_lines=False
    ),
)
