"""A worker takes answers between two layers of training, refuses training rows that are none of its, and
moves pages while it computes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clusters import KEY, hosts
from coserve.adapters.files import read_adapter
from coserve.cluster.blocks import files_digest, load_block
from coserve.cluster.instance import ArrivedRows, OpenBlock
from coserve.cluster.messages import (
    CancelRows,
    CopyPages,
    Hop,
    LifeSign,
    LoadBlock,
    PassRows,
    Ping,
    Pong,
    RowSegment,
    RowsPassed,
    Settled,
    TrainRows,
)
from coserve.cluster.peer import Peer, connect
from models import save, tiny, with_lora
from waiting import wait_until

pytestmark = pytest.mark.local


def told(peer: Peer) -> Any:
    """The next message that tells more than that somebody lives or something came."""
    while (found := peer.receive()) is not None and isinstance(found[0], LifeSign | Settled):
        pass
    return found


def test_training_is_below_answers_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tiny("llama", torch.float32, num_hidden_layers=2), tmp_path / "model")
    with hosts(tmp_path / "w", 1) as (worker,):
        peer = connect(worker.address, KEY.encode(), "s")
        peer.send(LoadBlock(1, str(model), files_digest(model), 0, 2, "float32", 4, 8, 4))
        loaded, settled = peer.receive(), peer.receive()
        assert loaded is not None and settled is not None
        rows, width = 3, worker._instances["s", 1].block.base.hidden_size
        hidden = torch.ones(rows, width)
        for given, tensors, said in (
            ({"last": 3}, [hidden], "layers 0 to 2, of which some are not in this block"),
            ({"bottom": 2}, [hidden, hidden], "are not in this block"),
            ({"lengths": (3, 1)}, [hidden], "a message of 4 training rows has other tensors"),
            ({"bottom": 0}, [hidden], "has other tensors"),
            ({"adapter": "none@0"}, [hidden], "adapter 'none@0' are not on the device"),
            ({"instance": 2}, [hidden], "has no instance 2"),
        ):
            fields: dict[str, Any] = {"number": 5, "scheduler": "s", "instance": 1, "first": 0, "last": 2}
            peer.send(TrainRows(**{**fields, "lengths": (3,), **given}), tensors)
            failed: Any = peer.receive()
            assert said in failed[0].text
        has_passed: list[bool] = []
        train, run = OpenBlock.train, OpenBlock.run

        def never_ends_before_answers(block: OpenBlock, *given: Any) -> Iterator[Any]:
            while not has_passed:
                yield None
            yield from train(block, *given)

        monkeypatch.setattr(OpenBlock, "train", never_ends_before_answers)
        monkeypatch.setattr(OpenBlock, "run", lambda *given: has_passed.append(True) or run(*given))
        peer.send(TrainRows(6, "s", 1, 0, 2, (3,), bottom=1, needs_input=True), [hidden, hidden])
        peer.send(
            PassRows(7, "s", (RowSegment(1, 1, 0, (0,)),), (Hop(worker.address, 1, (0,)),)), [hidden[:1]]
        )
        first, second = told(peer), told(peer)
        assert first is not None and second is not None
        assert (first[0].number, second[0].number) == (7, 6)
        assert [tuple(x.shape) for x in second[1]] == [(rows, width)], "no parameter trains"
        peer.close()


def test_pages_move_while_a_pass_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is written does not wait for the pass, unless that no longer counts and may write there;
    one whose move was cancelled is never written."""
    model = save(tiny("llama", torch.float32, num_hidden_layers=2), tmp_path / "model")
    run, write, goes_on, done = OpenBlock.run, OpenBlock.write_pages, threading.Event(), list[str]()
    monkeypatch.setattr(
        OpenBlock, "run", lambda *given: goes_on.wait(60.0) and (run(*given), done.append("passed"))[0]
    )
    with hosts(tmp_path / "w", 2) as (sender, receiver):
        peers = [connect(one.address, KEY.encode(), "s") for one in (sender, receiver)]
        for number, peer in enumerate(peers):
            peer.send(LoadBlock(number, str(model), files_digest(model), 0, 2, "float32", 4, 8, 4))
            assert peer.receive() is not None and peer.receive() is not None
        own, other = sender._instances["s", 0].block, receiver._instances["s", 1].block
        data = torch.randint(0, 99, (2, own.attention.page_nbytes), dtype=torch.uint8)
        own.write_pages((1, 2), data)
        other.write_pages((0, 1, 2, 3), torch.zeros(4, data.shape[1], dtype=torch.uint8))
        hidden, to = torch.ones(1, own.base.hidden_size), Hop(receiver.address, 1)
        peers[1].send(PassRows(1, "s", (RowSegment(1, 1, 0, (0,)),), (to,)), [hidden])
        peers[1].send(CancelRows((2,)))
        peers[1].send(Ping())
        assert isinstance((told(peers[1]) or ((),))[0], Pong), "it was cancelled before the page comes"
        for number, page in ((2, 1), (3, 2)):
            peers[0].send(CopyPages(number, "s", 0, (page,), to))
        moved = told(peers[1])
        monkeypatch.setattr(OpenBlock, "write_pages", lambda *given: done.append("written") or write(*given))
        peers[1].send(CancelRows((1,)))
        peers[1].send(Ping())
        assert isinstance((told(peers[1]) or ((),))[0], Pong), "the pass no longer counts"
        peers[0].send(CopyPages(4, "s", 0, (2,), to, into=(0,)))
        wait_until(lambda: receiver._moving.locked() or bool(done))
        computed, last = (goes_on.set(), told(peers[1]))[1], told(peers[1])
        assert last is not None and isinstance(last[0], RowsPassed) and done == ["passed", "written"]
        assert torch.equal(other.read_pages((0,))[0], data[1]), "and nothing of the pass"
        assert moved is not None and isinstance(moved[0], RowsPassed) and moved[0].number == 3
        assert computed is not None and isinstance(computed[0], RowsPassed) and computed[0].number == 1
        assert torch.equal(other.read_pages((2,))[0], data[1]), "a page that came meanwhile"
        assert not other.read_pages((1,)).any(), "a page whose move was cancelled"
        for peer in peers:
            peer.close()


def test_a_surrogate_predicts_without_a_trace(tmp_path: Path) -> None:
    """The prediction is the output of a pass with this version, and no page that passes read changes."""
    model = tiny("llama", torch.float32, num_hidden_layers=2)
    folder, adapter = save(model, tmp_path / "model"), tmp_path / "half"
    with_lora(model, seed=1).save_pretrained(str(adapter))
    base, content = load_block(folder, range(2), torch.float32, "cpu")
    asked = LoadBlock(1, str(folder), "", 0, 2, "float32", 4, 8, 4, spare=1)
    blocks = [OpenBlock(base, content, asked) for _ in range(2)]
    for block in blocks:
        block.loaded.add(read_adapter(adapter, "half", base.frame, torch.float32, base.device))
    hidden = torch.randn(11, base.hidden_size)
    place = Hop("a", 1, (2, 0), "half@0"), Hop("b", 1)
    for context in (0, 10):  # in the second page, behind two of its rows
        for block in blocks:
            rows = RowSegment(1, 1 if context else 10, context, (2, 0))
            given = hidden[context : context + rows.length]
            arrived = ArrivedRows(PassRows(context, "s", (rows,), place), given)
            before = block.read_pages([0, 2])
            if not context:
                block.run([arrived])
            elif block is blocks[0]:
                predicted = block.predict(arrived)
                assert torch.equal(block.read_pages([0, 2]), before)
            else:
                own = RowSegment(1, 1, context, (2, 0), "half@0")
                message = PassRows(context, "s", (own,), (Hop("a", 1),))
                (wanted,) = block.run([ArrivedRows(message, arrived.hidden)])
    torch.testing.assert_close(predicted, wanted, rtol=0, atol=1e-5)
