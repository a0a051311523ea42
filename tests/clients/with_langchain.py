"""LangChain: chats, streams, calls of tools, structured answers and embeddings."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
common = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 256}
chat = ChatOpenAI(**common)


class City(BaseModel):
    """A city and the number of its people."""

    name: Literal["Rome", "Ulm"]
    people: int = Field(ge=0, le=9)


@tool
def weather(city: Literal["Rome", "Ulm"]) -> str:
    """Tells the weather in a city."""
    return f"rain in {city}"


messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
answer = chat.invoke(messages)
assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
pieces = [piece.content for piece in chat.stream(messages)]
assert "".join(pieces), "a stream has text"

called = chat.bind_tools([weather], tool_choice="weather", strict=True).invoke("What is the weather?")
(call,) = called.tool_calls
assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Ulm"), called
said = chat.invoke([HumanMessage("What is the weather?"), called, weather.invoke(call)])
assert isinstance(said.content, str)

for method in ("json_schema", "function_calling"):
    city = chat.with_structured_output(City, method=method, strict=True).invoke("A city, please.")
    assert isinstance(city, City), (method, city)

responses = ChatOpenAI(**common, use_responses_api=True)
assert responses.invoke("Hello").text, "Responses has text"

vectors = OpenAIEmbeddings(
    model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
).embed_documents(["one", "two"])
assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 0 and vectors[0] != vectors[1]
