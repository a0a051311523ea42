"""Prompt tuning: rows of input embeddings before every sequence, trained directly. Lester et al. 2021."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from coserve.adapters.bypass import Part, Place, Side
from coserve.adapters.method import Written
from coserve.adapters.prompts import EMBEDDINGS, PlainPrompt, expect_count, prompt_fields, read_prompt
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame
from coserve.adapters.virtual import prompt_site
from coserve.errors import AdapterError

Start = Literal["RANDOM", "SAMPLE_VOCAB"]


@dataclass(frozen=True, slots=True)
class PromptTuningConfig:
    """Settings of prompt tuning: `tokens` virtual tokens. They start from the embeddings of `text` (token
    ids, repeated or cut to fit), or else from noise or tokens drawn from the vocabulary (`start`, in PEFT's
    words)."""

    tokens: int = 20
    start: Start = "RANDOM"
    text: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expect_count("prompt tuning", self.tokens)
        if self.start not in get_args(Start):
            raise AdapterError(f"prompts start from {' or '.join(get_args(Start))}, not {shown(self.start)}")
        if isinstance(self.text, str) or not all(type(token) is int and token >= 0 for token in self.text):
            raise AdapterError("the text that a prompt starts from must be given as token ids")


class PromptTuning:
    """Prompt embeddings before every sequence."""

    name, peft_type, config = "prompt_tuning", "PROMPT_TUNING", PromptTuningConfig
    aliases: Final = {"num_virtual_tokens": "tokens", "prompt_tuning_init": "start"}

    def fresh(self, config: PromptTuningConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Starts as PEFT's RANDOM, SAMPLE_VOCAB or TEXT does."""
        site = prompt_site(frame)
        vocabulary = site.inputs
        if config.text:
            if max(config.text) >= vocabulary:
                raise AdapterError(f"token {max(config.text)} is not one of the model's {vocabulary}")
            ids = torch.tensor([config.text[i % len(config.text)] for i in range(config.tokens)])
            embeddings = frame.frozen.embedded(ids)
        elif config.start == "SAMPLE_VOCAB":
            ids = torch.randint(vocabulary, (config.tokens,), generator=generator)
            embeddings = frame.frozen.embedded(ids)
        else:
            embeddings = torch.randn(config.tokens, site.outputs, generator=generator, dtype=torch.float32)
        return Part(self.name, config, {Place(site.path, Side.PROMPT): PlainPrompt(embeddings.float().cpu())})

    def read(self, saved: Saved, frame: Frame) -> Part:
        saved.ignore(
            "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"
        )
        prompt = read_prompt(saved, frame)
        config = PromptTuningConfig(prompt.count)
        return Part(self.name, config, {Place(prompt_site(frame).path, Side.PROMPT): prompt})

    def write(self, part: Part) -> Written:
        (prompt,) = part.bypasses.values()
        assert isinstance(prompt, PlainPrompt)
        fields = {**prompt_fields(prompt.embeddings), "prompt_tuning_init": "RANDOM"}
        return Written(fields, {EMBEDDINGS: prompt.embeddings})


METHOD = PromptTuning()
