"""LiteLLM: chats by OpenAI's and vLLM's names, streams, tools, texts, embeddings, Anthropic's messages."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices from elsewhere
import litellm

url, model = sys.argv[1:]
asked = [{"role": "user", "content": "Hello"}]
for provider in ("openai", "hosted_vllm"):
    given = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 16}
    answer = litellm.completion(messages=asked, **given)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0, answer
    pieces = list(litellm.completion(messages=asked, stream=True, **given))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    days = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    function = {"name": "weather", "parameters": days}
    called = litellm.completion(
        messages=asked,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        **{**given, "max_tokens": 256},
    )
    assert called.choices[0].message.tool_calls[0].function.name == "weather", called

text = litellm.text_completion(
    model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="none", prompt="Once", max_tokens=4
)
assert text.choices[0].text
found = litellm.embedding(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", input=["one"])
assert found.data[0]["embedding"]
message = litellm.completion(
    model=f"anthropic/{model}", api_base=url, api_key="none", messages=asked, max_tokens=8
)
assert message.choices[0].message.content, message
