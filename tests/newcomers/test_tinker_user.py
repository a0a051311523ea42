"""A user of Tinker: the official client trains a little, samples, saves, and goes on from what it saved."""

from typing import Any

import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from coserve import tiny
from documented import Desk

STEPS = 6
PAIRS = (("Where does Mira live?", "In a lighthouse."), ("Who mends nets?", "Old Tom does."))


def data() -> list[types.Datum]:
    """Two chats, of which the answers are learned."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    made = []
    for question, answer in PAIRS:
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = [*asked, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        weights = [0.0] * (len(asked) - 1) + [1.0] * (len(tokens) - len(asked))
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


def loss_of(run: Any) -> float:
    return float(run.forward(data(), "cross_entropy").result().metrics["loss:sum"])


def step(run: Any) -> float:
    """One optimizer step; the loss before it."""
    passed = run.forward_backward(data(), "cross_entropy")  # both are on their way at once
    stepped = run.optim_step(types.AdamParams(learning_rate=3e-3))
    stepped.result()
    return float(passed.result().metrics["loss:sum"])


def greedy(sampler: Any) -> list[int]:
    prompt = data()[0].model_input.to_ints()[:12]
    params = types.SamplingParams(max_tokens=12, temperature=0.0)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences
    return list(sequence.tokens)


def test_a_run_trains_samples_saves_and_goes_on(served: Desk) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key="tml-any") as service:
        run = service.create_lora_training_client(base_model="coserve-tiny", rank=8, seed=0).result()
        losses = [step(run) for _ in range(STEPS)]
        assert losses[-1] < 0.7 * losses[0]
        with pytest.raises(tinker.TinkerError):  # a name with a space; it takes its turn
            run.save_state("not a name").result()
        saved = run.save_state("half").result().path
        weights = run.save_weights_for_sampler("half").result().path
        further = [step(run) for _ in range(2)]
        assert greedy(service.create_sampling_client(model_path=weights).result())
    with tinker.ServiceClient(base_url=served.url, api_key="tml-any") as service:  # another day
        again = service.create_training_client_from_state_with_optimizer(saved).result()
        assert [step(again) for _ in range(2)] == pytest.approx(further, rel=1e-3)
        assert loss_of(again) < further[-1]
        sampler = again.save_weights_and_get_sampling_client().result()
        assert greedy(sampler) != greedy(service.create_sampling_client(base_model="coserve-tiny").result())
        rest = tinker.RestClient(base_url=served.url, api_key="tml-any")
        checkpoints = rest.list_user_checkpoints().result().checkpoints
        assert {saved, weights} <= {one.tinker_path for one in checkpoints}
