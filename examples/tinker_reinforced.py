"""Reinforcement learning through the `tinker` client, shaped like the cookbook's `rl_loop`: groups of answers
to each prompt, advantages within the group, one policy-gradient step on all of them.

    coserve serve &
    TINKER_API_KEY=tml-any python examples/tinker_reinforced.py --url http://127.0.0.1:8000

The reward is easy to see: the share of an answer's words that begin with the letter s.
"""

import argparse
from statistics import fmean

import tinker
from tinker import types
from transformers import AutoTokenizer

from coserve import tiny

PROMPTS = ["Once upon a time", "The old man", "In the morning", "Nobody knew"]


def reward(text: str) -> float:
    """The share of words that begin with s."""
    words = text.lower().split()
    return sum(word.startswith("s") for word in words) / max(len(words), 1)


def train(
    url: str | None, steps: int, group: int = 8, most_tokens: int = 16, model: str = "coserve-tiny"
) -> list[float]:
    """Trains for `steps` steps with `group` answers to each prompt; the mean reward of every step."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    with tinker.ServiceClient(base_url=url) as service:
        run = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        rewards = []
        for step in range(steps):
            sampler = run.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=most_tokens, seed=step)
            asked = [sampler.sample(types.ModelInput.from_ints(prompt), group, params) for prompt in prompts]
            data, earned = [], []
            for prompt, future in zip(prompts, asked, strict=True):
                answers = future.result().sequences
                scores = [reward(tokenizer.decode(one.tokens)) for one in answers]
                earned += scores
                data += [
                    datum(prompt, one, score - fmean(scores))
                    for one, score in zip(answers, scores, strict=True)
                ]
            passed = run.forward_backward(data, "importance_sampling")
            run.optim_step(types.AdamParams(learning_rate=4e-3)).result()
            passed.result()
            rewards.append(fmean(earned))
            print(f"step {step}: reward {rewards[-1]:.3f}")
    return rewards


def datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """A sampled answer, each of whose tokens has the answer's advantage."""
    tokens, before = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    assert answer.logprobs is not None
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*before, *answer.logprobs],
        "advantages": [*before, *[advantage] * len(answer.tokens)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of the server; $TINKER_BASE_URL by default")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    train(asked.url, asked.steps)


if __name__ == "__main__":
    main()
