"""openai-agents: an agent whose tool is called, by chats and by Responses."""

import asyncio
import sys
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI

url, model = sys.argv[1:]
set_tracing_disabled(True)
calls = []


@function_tool
def add(left: Literal[1, 2], right: Literal[1, 2]) -> int:
    """Adds two numbers."""
    calls.append((left, right))
    return left + right


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="sums",
            instructions="Add.",
            model=kind(model, client),
            tools=[add],
            model_settings=ModelSettings(tool_choice="required", max_tokens=256),
        )
        before = len(calls)
        result = await Runner.run(agent, "1 and 2?", max_turns=4)
        assert len(calls) > before, f"{kind.__name__} calls the tool"
        assert isinstance(result.final_output, str)
        plain = Agent(name="says", model=kind(model, client), model_settings=ModelSettings(max_tokens=2000))
        streamed = Runner.run_streamed(plain, "Hello")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and streamed.final_output, kinds


asyncio.run(main())
