"""MiniMax M2: `<invoke name="...">` and its parameters, all calls within one `<minimax:tool_call>`."""

from typing import Final

from coserve.text.tools.syntax import NAME, Syntax
from coserve.text.tools.xml_calls import ParameterSyntax, XmlCalls

MINIMAX: Final = XmlCalls(
    "minimax_m2",
    Syntax(
        opening="<minimax:tool_call>\n",
        before=f'<invoke name="{NAME}">',
        after="",
        between="\n",
        closing="\n</minimax:tool_call>",
    ),
    ParameterSyntax(f'<parameter name="{NAME}">', "</parameter>", "</invoke>", has_lines=False),
)
