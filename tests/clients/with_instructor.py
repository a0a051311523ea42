"""instructor: objects of a class, by a tool, by JSON and by a schema; lists of them, streamed."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Mood(BaseModel, extra="forbid"):
    """A text has a mood, of a degree."""

    mood: Literal["good", "bad"]
    degree: int = Field(ge=0, le=9)


asked = [{"role": "user", "content": "How does this sound?"}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model=model, messages=asked, response_model=Mood, max_tokens=256, max_retries=0
    )
    assert isinstance(found, Mood), (mode, found)
