"""Supervised fine-tuning through the `tinker` client, shaped like the cookbook's `sl_loop`.

coserve serve &
TINKER_API_KEY=tml-any python examples/tinker_supervised.py --url http://127.0.0.1:8000
"""

import argparse

import tinker
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coserve import tiny

PAIRS = [
    ("Where does Mira live?", "In a lighthouse at the end of the pier."),
    ("Who is Mira's friend?", "Old Tom, who mends nets."),
    ("What does Mira fear?", "Nothing but a calm sea."),
]


def datum(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> types.Datum:
    """A chat of one turn, of which the answer is learned."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = [*asked, *said]
    weights = [0.0] * (len(asked) - 1) + [1.0] * len(said)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(url: str | None, steps: int, model: str = "coserve-tiny") -> list[float]:
    """Trains for `steps` steps, and prints an answer; the losses for each token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    with tinker.ServiceClient(base_url=url) as service:
        run = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        data = [datum(tokenizer, *pair) for pair in PAIRS]
        learned = sum(sum(one.loss_fn_inputs["weights"].data) for one in data)
        losses = []
        for step in range(steps):
            passed = run.forward_backward(data, "cross_entropy")  # both are on their way at once
            stepped = run.optim_step(types.AdamParams(learning_rate=2e-3 * (1 - step / steps)))
            losses.append(passed.result().metrics["loss:sum"] / learned)
            stepped.result()
            print(f"step {step}: loss {losses[-1]:.3f}")
        sampler = run.save_weights_and_get_sampling_client().result()
        question = [{"role": "user", "content": PAIRS[0][0]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        params = types.SamplingParams(max_tokens=32, temperature=0.0)
        (answer,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences
        print(PAIRS[0][0], tokenizer.decode(answer.tokens, skip_special_tokens=True))
    return losses


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of the server; $TINKER_BASE_URL by default")
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    train(asked.url, asked.steps)


if __name__ == "__main__":
    main()
