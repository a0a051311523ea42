"""Decoder layers without an adapter in them are one call, which gives what the same script computes alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coserve.split.attach import attach
from coserve.split.privacy.modes import Noise
from models import VOCABULARY, tiny
from split_served import ServedBase, differences, results, serving, spans_of

TOLERANCE = 1e-5  # float32: products of joined rows round differently
IDS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
LINEARS = {"gpt2": "transformer.h.{}.attn.c_attn", "llama": "model.layers.{}.self_attn.v_proj"}
Asked = list[tuple[str, list[int]]]


def with_lora(kind: str, layer: int, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    target = LINEARS.get(kind, LINEARS["llama"]).format(layer)
    config = LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
    return get_peft_model(tiny(kind, **changes), config).train()


def asked(served: ServedBase) -> Asked:
    """Calls of whole layers since the last look, by direction, with the numbers of the layers."""
    numbers = {layer.path: layer.number for layer in spans_of(served.linears.hello, "layer")}
    found = [(way, [numbers[path] for path in paths]) for way, paths in served.calls if paths[0] in numbers]
    served.calls.clear()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_training_with_an_adapter_in_one_layer(kind: str, tmp_path: Path) -> None:
    """Layers ahead of it are one call without a way back, those behind it one call each way. Gemma 2's are of
    two kinds in turn, whose windows differ."""
    changes = {"gemma2": {"sliding_window": 4}}.get(kind, {})
    with serving(tiny(kind, **changes), tmp_path) as served:
        for layer, together, apart in (
            (2, [("forward", [0, 1])], [("forward", [0]), ("forward", [1])]),
            (
                0,
                [("forward", [1, 2]), ("backward", [1, 2])],
                [("forward", [1]), ("forward", [2]), ("backward", [2]), ("backward", [1])],
            ),
        ):
            plain, client = with_lora(kind, layer, **changes), with_lora(kind, layer, **changes)
            attach(client, served.address, blocks=True)
            for _ in range(3):  # in the first pass all go both ways
                found, wanted = results(client, IDS), results(plain, IDS)
                assert max(differences(found, wanted).values()) <= TOLERANCE and len(wanted) == 3
            served.calls.clear()
            results(client, IDS)
            assert asked(served) == (apart if kind == "gemma2" else together)
            assert not served.work.keys() - {"training"}


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_sequences_that_are_packed_attend_to_themselves(kind: str, tmp_path: Path) -> None:
    positions = torch.cat([torch.arange(length) for length in (4, 1, 6)])[None]
    ids = torch.randint(1, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(5))
    changes = {"gemma2": {"sliding_window": 4}}.get(kind, {})
    plain, client = with_lora(kind, 0, **changes), with_lora(kind, 0, **changes)
    with serving(tiny(kind, **changes), tmp_path) as served:
        attach(client, served.address, blocks=True)
        for _ in range(2):
            served.calls.clear()
            found = results(client, ids, position_ids=positions, use_cache=False)
            wanted = results(plain, ids, position_ids=positions, use_cache=False)
            assert max(differences(found, wanted).values()) <= TOLERANCE
        assert sum(len(layers) for way, layers in asked(served) if way == "forward") == 2
    one = results(plain, ids[:, 5:], use_cache=False)["logits"]
    torch.testing.assert_close(found["logits"][:, 5:], one, rtol=1e-4, atol=1e-4)


def test_what_is_not_whole_sequences_goes_its_own_way(tmp_path: Path) -> None:
    """Padding, a cache, positions that begin later, hidden states that are asked for, hooks, checkpoints."""
    padded = torch.ones_like(IDS)
    padded[1, 6:] = 0
    plain, client = tiny("llama"), tiny("llama")
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        attach(client, served.address, blocks=True)
        for _ in range(2):
            client(IDS, use_cache=False)
        served.calls.clear()
        client(IDS, use_cache=False)
        assert asked(served) == [("forward", [0, 1, 2])]

        def check(expected: Asked, **given: Any) -> None:
            served.calls.clear()
            found, wanted = client(IDS, **given), plain(IDS, **given)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=TOLERANCE)
            assert asked(served) == expected
            for x, y in zip(found.hidden_states or (), wanted.hidden_states or (), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=TOLERANCE)

        check([], use_cache=True)
        check([], attention_mask=padded, use_cache=False)
        check([], position_ids=torch.arange(2, 11)[None], use_cache=False)
        check([("forward", [0, 1, 2])], attention_mask=torch.ones_like(IDS), use_cache=False)
        options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
        assert torch.equal(client.generate(IDS, **options), plain.generate(IDS, **options))
        seen: list[Tensor] = []
        handle = client.model.layers[1].register_forward_hook(lambda _, __, y: seen.append(y))
        check([("forward", [0]), ("forward", [1]), ("forward", [2])], use_cache=False)
        handle.remove()
        wanted = plain(IDS, use_cache=False, output_hidden_states=True).hidden_states[2]
        torch.testing.assert_close(seen[0], wanted, rtol=1e-5, atol=TOLERANCE)
        check([], use_cache=False, output_hidden_states=True)  # transformers' hooks are in attention, too
    trained, alone = with_lora("llama", 0), with_lora("llama", 0)
    with serving(tiny("llama"), tmp_path) as served:
        attach(trained, served.address, blocks=True)
        for model in (trained, alone):
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        for _ in range(2):
            assert max(differences(results(trained, IDS), results(alone, IDS)).values()) <= TOLERANCE
        assert not asked(served)


def test_a_row_crosses_once_each_way_for_all_layers(tmp_path: Path) -> None:
    """Bytes of a token, counted by the executor; the head is a call of its own."""
    found = {}
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        for blocks in (False, True):
            client = tiny("llama")
            attach(client, served.address, spans="never", blocks=blocks)
            for _ in range(2):
                before = served.executor.status()
                client(IDS, use_cache=False)
            after = served.executor.status()
            counted = after.received_bytes - before.received_bytes + after.sent_bytes - before.sent_bytes
            found[blocks] = counted / IDS.numel()
    head, linears = 4 * (64 + VOCABULARY), 4 * (64 + 64 + 2 * 32 + 64 + 64 + 64 + 2 * 96 + 96 + 64)
    assert found == {False: 3 * linears + head, True: 4 * (64 + 64) + head}


def test_what_a_script_changes_in_a_layer_is_heard(tmp_path: Path) -> None:
    """A norm of its own, which is compared again; an adapter that comes later; a copy of the model; noise."""
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        plain, client = tiny("llama"), tiny("llama")
        attach(client, served.address, blocks=True)
        for _ in range(2):
            client(IDS, use_cache=False)
        for model in (plain, client):
            model.model.layers[1].input_layernorm.weight.mul_(1.5)
        for _ in range(3):
            served.calls.clear()
            found = client(IDS, use_cache=False).logits
            torch.testing.assert_close(found, plain(IDS, use_cache=False).logits, rtol=1e-5, atol=TOLERANCE)
        assert asked(served) == [("forward", [0]), ("forward", [2])]
        copied = copy.deepcopy(client)
        torch.testing.assert_close(copied(IDS, use_cache=False).logits, found, rtol=1e-5, atol=TOLERANCE)
        assert not asked(served)
        target = LINEARS["llama"].format(2)
        wrapped = get_peft_model(client, LoraConfig(r=4, target_modules=[target], init_lora_weights=False))
        changed = wrapped(IDS, use_cache=False).logits
        assert asked(served) == [("forward", [0])] and (changed - found).abs().max() > 0.1
        hidden = tiny("llama")
        attach(hidden, served.address, privacy=Noise(), blocks=True)
        for _ in range(2):
            hidden(IDS, use_cache=False)
        assert not asked(served)


def test_layers_that_compute_something_else_go_their_own_way(tmp_path: Path) -> None:
    """The linears are the same: only a trial can tell that positions or attention are not."""
    for changes in ({"rope_theta": 50.0}, {"rms_norm_eps": 0.5}, {"attention_dropout": 0.5}):
        fields = dict(changes)
        if "rope_theta" in fields:
            fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
        plain, client = tiny("llama", **fields), tiny("llama", **fields)
        with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
            attach(client, served.address, blocks=True)
            for model in (plain, client):
                model.train("attention_dropout" in fields)
            for _ in range(2):
                served.calls.clear()
                torch.manual_seed(1)
                found = client(IDS, use_cache=False).logits
                torch.manual_seed(1)
                wanted = plain(IDS, use_cache=False).logits
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=TOLERANCE)
            assert not asked(served), changes
