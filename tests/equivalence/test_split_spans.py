"""A feed-forward layer without an adapter in it is one call, which gives what its linears would."""

import copy
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.errors import ConfigError, NotOffered
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.privacy.modes import Noise
from coserve.split.transport import SocketTransport
from coserve.train.example import Example
from mixed import SAMPLING
from models import VOCABULARY, tiny
from split_served import ServedBase, differences, results, serving

TOLERANCE = 1e-5  # float32: products of joined rows round differently
LAYERS = 3
IDS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4)


def with_lora(kind: str, *targets: str) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(tiny(kind), config).train()


def spans_asked(served: ServedBase) -> list[tuple[str, int]]:
    """Calls of spans since the last look, by direction and layer."""
    found = [(way, int(paths[0].split(".")[2])) for way, paths in served.calls if paths[0].endswith(".mlp")]
    served.calls.clear()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_inference_is_the_same_with_a_call_less_a_layer(kind: str, tmp_path: Path) -> None:
    plain, client = tiny(kind), tiny(kind)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    with serving(tiny(kind), tmp_path) as served, torch.no_grad():
        attach(client, served.address)
        for _ in range(2):  # the first pass goes both ways
            torch.testing.assert_close(client(IDS).logits, plain(IDS).logits, rtol=1e-5, atol=TOLERANCE)
        served.calls.clear()
        client(IDS)
        groups = len(served.linears.hello.groups)
        assert len(served.calls) == groups - LAYERS
        assert spans_asked(served) == [("forward", layer) for layer in range(LAYERS)]
        assert torch.equal(client.generate(IDS, **options), plain.generate(IDS, **options))
        never = tiny(kind)
        attach(never, served.address, spans="never")
        served.calls.clear()
        never(IDS)
        assert len(served.calls) == groups


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("spans", ["forward", "always"])
def test_training_recomputes_where_it_is_asked_to(kind: str, spans: str, tmp_path: Path) -> None:
    """An adapter on layer 1's attention: no gradient goes below it."""
    torch.manual_seed(1)
    target = "transformer.h.1.attn.c_attn" if kind == "gpt2" else "model.layers.1.self_attn.v_proj"
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
        models.append(get_peft_model(tiny(kind), config).train())
    plain, client = models
    with serving(tiny(kind), tmp_path) as served:
        attach(client, served.address, spans=spans)  # type: ignore[arg-type]
        for _ in range(2):
            found, wanted = results(client, IDS), results(plain, IDS)
            assert max(differences(found, wanted).values()) <= TOLERANCE and len(wanted) == 3
        served.calls.clear()
        results(client, IDS)
        own = {"forward": [("forward", 0)], "always": [("forward", 0), ("forward", 1), ("forward", 2)]}[spans]
        back = [] if spans == "forward" else [("backward", 2), ("backward", 1)]
        assert spans_asked(served) == own + back
        assert not served.work.keys() - {"training"}


def test_an_adapter_inside_is_heard_and_one_beside_costs_nothing(tmp_path: Path) -> None:
    with serving(tiny("llama"), tmp_path) as served:
        for targets, expected in ((("q_proj", "v_proj"), LAYERS), (("up_proj",), 0)):
            for is_wrapped_first in (True, False):
                plain, client = with_lora("llama", *targets), with_lora("llama", *targets)
                if is_wrapped_first:
                    attach(client, served.address)
                else:
                    bare = tiny("llama")
                    attach(bare, served.address)
                    with torch.no_grad():
                        bare(IDS), bare(IDS)  # its spans are in use when the adapter comes
                    client = get_peft_model(bare, LoraConfig(r=4, target_modules=list(targets)))
                    client.load_state_dict(
                        {k: v for k, v in plain.state_dict().items() if "lora_" in k}, False
                    )
                with torch.no_grad():
                    for _ in range(2):
                        served.calls.clear()
                        found = client(IDS).logits
                torch.testing.assert_close(found, plain(IDS).logits.detach(), rtol=1e-5, atol=TOLERANCE)
                assert len(spans_asked(served)) == expected


def test_what_a_script_does_inside_is_done(tmp_path: Path) -> None:
    """Hooks, dropout, training a frozen weight, and a copy of the model that gets an adapter."""
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        client = tiny("llama")
        attach(client, served.address)
        client(IDS), client(IDS)
        seen: list[int] = []
        inner = client.model.layers[1].mlp.act_fn
        handle = inner.register_forward_hook(lambda *_: seen.append(1))
        served.calls.clear()
        client(IDS)
        assert spans_asked(served) == [("forward", 0), ("forward", 2)] and seen == [1]
        handle.remove()
        copied = copy.deepcopy(client)
        served.calls.clear()
        torch.testing.assert_close(copied(IDS).logits, client(IDS).logits, rtol=1e-5, atol=TOLERANCE)
        wrapped = get_peft_model(
            copied, LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
        )
        served.calls.clear()
        changed = wrapped(IDS).logits
        assert not spans_asked(served) and (changed - client(IDS).logits).abs().max() > 0.1
        assert len(spans_asked(served)) == LAYERS  # the original is as it was
        client.model.layers[0].mlp.up_proj.weight.requires_grad_()
        with pytest.raises(NotOffered, match=r"layers.0.mlp.up_proj.weight is to be trained"):
            client(IDS)
        with pytest.raises(ConfigError, match="spans 'often' is none of"):
            attach(tiny("llama"), served.address, spans="often")  # type: ignore[arg-type]


def test_dropout_in_a_span_is_the_clients(tmp_path: Path) -> None:
    with serving(tiny("gpt2"), tmp_path) as served, torch.no_grad():
        client = tiny("gpt2", resid_pdrop=0.3)
        attach(client, served.address)
        for is_training, expected in ((True, 0), (False, LAYERS)):
            client.train(is_training)
            client(IDS)
            served.calls.clear()
            first, second = client(IDS).logits, client(IDS).logits
            assert len(spans_asked(served)) == 2 * expected and torch.equal(first, second) is not is_training


def test_a_module_that_computes_something_else_goes_its_own_way(tmp_path: Path) -> None:
    """The weights are the same, so nothing but a trial can tell."""
    plain, client = (tiny("llama", hidden_act="gelu") for _ in range(2))
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        attach(client, served.address)
        for _ in range(3):
            torch.testing.assert_close(client(IDS).logits, plain(IDS).logits, rtol=1e-5, atol=TOLERANCE)
        served.calls.clear()
        client(IDS)
        assert not spans_asked(served)


def test_rows_under_noise_are_sent_to_linears_alone(tmp_path: Path) -> None:
    with serving(tiny("llama"), tmp_path) as served, torch.no_grad():
        client = tiny("llama")
        attach(client, served.address, privacy=Noise())
        client(IDS), client(IDS)
        assert served.calls and not spans_asked(served)


class CountingProxy:
    """Passes bytes between a client and an executor, and counts them."""

    def __init__(self, there: Address) -> None:
        self.counted = 0
        self._there = there
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address.parse(f"tcp:127.0.0.1:{self._listening.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listening:
            near, _ = self._listening.accept()
        far = self._there.connect()
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self.counted += len(data)
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            end.close()


@contextmanager
def counted(served: ServedBase) -> Iterator[CountingProxy]:
    yield CountingProxy(Address.parse(served.address))


def test_bytes_of_a_layer_and_token(tmp_path: Path) -> None:
    """Counted on the way, without shared memory. Widths of Llama-3.1-8B would be 14,336 instead of 96 between
    the linears and 4,096 instead of 64 elsewhere: 100 KB a token in bfloat16, and 16 KB."""
    ids = torch.randint(1, VOCABULARY, (4, 100))
    tokens, found = ids.numel(), {}
    with serving(tiny("llama"), tmp_path) as served:
        for spans in ("never", "forward"):
            with counted(served) as proxy, torch.no_grad():
                client = tiny("llama")
                attach(client, SocketTransport(proxy.address), spans=spans)  # type: ignore[arg-type]
                client(ids)
                before = proxy.counted
                client(ids)
                found[spans] = (proxy.counted - before) / tokens
    between = 4 * (64 + 2 * 96 + 96 + 64)
    saved = (found["never"] - found["forward"]) / LAYERS
    assert saved == pytest.approx(between - 4 * 2 * 64, rel=0.02)
    attention, head = 4 * (64 + 64 + 2 * 32 + 64 + 64), 4 * (64 + VOCABULARY)
    assert found["forward"] == pytest.approx(LAYERS * (attention + 4 * 2 * 64) + head, rel=0.02)


GRADIENTS = TrainingConfig(
    learning_rate=1e3, epsilon=1e3, batch_size=1, max_steps=1, warmup_ratio=0.0, rows=48, weight_decay=0.0
)


def test_an_engine_calls_spans_where_no_row_has_an_adapter_inside(tmp_path: Path) -> None:
    """Of an executor without spans between attention, which would have them. Training keeps what the linears
    give, so its rows go to linears."""
    beside, inside = (
        LoRAConfig(rank=4, targets=("q_proj", "v_proj")),
        LoRAConfig(rank=4, targets=("up_proj",)),
    )
    example, answers = Example(tuple(range(1, 13)), tuple(range(2, 14))), []
    with serving(tiny("llama"), tmp_path, cuts=["module"]) as served:
        for config in (CONFIG, replace(CONFIG, base=served.address)):
            engine, found = Engine(tiny("llama"), config), {}
            for name, method in (("beside", beside), ("inside", inside)):
                served.calls.clear()
                engine.finetune([example], name, method, GRADIENTS).result()
                found |= {f"{name}.{key}": x for key, x in engine.adapters.weights(name).parameters().items()}
                assert not spans_asked(served)
            for name, expected in ((None, LAYERS), ("beside", LAYERS), ("inside", 0)):
                answer = engine.generate([1, 5, 9], name, SAMPLING).result()
                found[f"{name}"] = torch.tensor([x.chosen for x in answer.logprobs])
                if config.base:
                    assert len(spans_asked(served)) == expected * len(answer.tokens)
            both = [engine.generate([1, 5, 9], name, SAMPLING) for name in ("beside", "inside")]
            found |= {
                f"at once {i}": torch.tensor([x.chosen for x in one.result().logprobs])
                for i, one in enumerate(both)
            }
            answers.append(found)
    assert max(differences(*answers[::-1]).values()) <= TOLERANCE
