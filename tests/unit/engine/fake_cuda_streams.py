"""Run by `test_fake_cuda.py`: the fake GPU finds what streams do to each other's memory without a wait."""

import sys
from pathlib import Path
from typing import Final
from unittest import mock

import torch

from coserve.core.plan import BasePlan, InferenceSegment, TrainingSegment
from coserve.core.sequence import Direction, Span
from coserve.worker.slices import SlicesUnderWay
from coserve.worker.streams import Answered, Streams
from fake_cuda import DEVICE, GPU, HostThread, Stream, found, install


def side() -> Stream:
    """A stream that knows all work so far."""
    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def reads_at_once() -> None:
    x, stream = torch.ones(4, device=DEVICE), Stream()
    with torch.cuda.stream(stream):
        x + 1
    torch.cuda.current_stream().wait_stream(stream)


def reads_after_a_wait() -> None:
    x, stream = torch.ones(4, device=DEVICE), side()
    with torch.cuda.stream(stream):
        y = x + 1
    torch.cuda.current_stream().wait_event(stream.record_event())
    y.mul_(2)
    stream.wait_stream(torch.cuda.current_stream())


def reads_after_the_host_has_waited() -> None:
    x, stream = torch.ones(4, device=DEVICE), Stream()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(stream):
        assert (x + 1).sum().item() is not None  # waits for it, too


def waited_too_early() -> None:
    x, stream = torch.ones(4, device=DEVICE), side()
    x.add_(1)
    with torch.cuda.stream(stream):
        x + 1
    torch.cuda.current_stream().wait_stream(stream)


def writes_what_another_reads() -> None:
    x, stream = torch.ones(4, device=DEVICE), side()
    with torch.cuda.stream(stream):
        x + 1
    x.zero_()
    torch.cuda.current_stream().wait_stream(stream)


def views_are_no_use() -> None:
    x, stream = torch.ones(4, device=DEVICE), Stream()
    with torch.cuda.stream(stream):
        x[:2].view(1, 2)


def frees_what_another_reads() -> None:
    x, stream = torch.ones(4, device=DEVICE), side()
    with torch.cuda.stream(stream):
        x + 1


def frees_what_is_recorded() -> None:
    x, stream = torch.ones(4, device=DEVICE), side()
    with torch.cuda.stream(stream):
        x + 1
    x.record_stream(stream)  # type: ignore[arg-type]


def uses_a_thread_s_result_before_it_is_known() -> None:
    x, thread = torch.ones(4, device=DEVICE), HostThread()
    torch.cuda.current_stream().synchronize()

    def work() -> torch.Tensor:
        with torch.cuda.stream(stream):
            y = x + 1
        stream.synchronize()  # this thread alone knows
        return y

    stream = Stream()
    future = thread.submit(work)
    future._value + 1
    future.result()


def uses_a_thread_s_result() -> None:
    x, thread = torch.ones(4, device=DEVICE), HostThread()

    def work() -> torch.Tensor:
        y = x + 1
        torch.cuda.current_stream().synchronize()
        return y

    future = thread.submit(work)
    assert not future.done()
    future.result().add_(1)


def seconds_are_those_of_a_stream_s_own_operations() -> None:
    """Three of training beside two of answers, whenever the host looks; what came before does not count."""
    kept = list[torch.Tensor]()

    def work(operations: int) -> None:
        kept.extend(torch.ones(4, device=DEVICE) for _ in range(operations))

    def answer(plan: BasePlan) -> Answered:
        work(2)
        return {}, []

    def train(plan: BasePlan) -> list[TrainingSegment]:
        work(3)
        return [*plan.training]

    row = InferenceSegment(0, 0, 1, 0, 1)
    window = TrainingSegment(0, "job", "job@0", 0, 4, 10, Direction.TRAIN_FORWARD, Span(0, 2), 2)
    with mock.patch("coserve.worker.streams.ThreadPoolExecutor", HostThread):
        streams = Streams(torch.device(DEVICE), answer, train)
        work(7)
        with streams.step(0.5):
            _, trained, _, seconds = streams.run(
                BasePlan(inference=(row,), training=(window,), share=0.5), False
            )
            answering = [seconds[0]]
        while not trained:
            with streams.step(0.5):
                _, trained, _, seconds = streams.run(BasePlan(inference=(row,), share=0.5), False)
                answering.append(seconds[0])
    assert trained == (window,) and seconds[1] == 3e-3 and {*answering} == {2e-3}, (answering, seconds)


def few_slices_are_under_way() -> None:
    """The host is never more than two slices ahead of the device, nor does it wait for more."""
    slices, kept = SlicesUnderWay(torch.device(DEVICE)), list[torch.Tensor]()
    for given in range(1, 6):
        kept.append(torch.ones(4, device=DEVICE))
        slices.add()
        assert GPU.host.get(GPU.current.number, 0) == max(given - 2, 0), "operations that the host knows of"


def waits_for_the_whole_device() -> None:
    torch.cuda.synchronize()


RIGHT: Final = (
    reads_after_a_wait, reads_after_the_host_has_waited, views_are_no_use, frees_what_is_recorded,
    uses_a_thread_s_result, seconds_are_those_of_a_stream_s_own_operations,
    few_slices_are_under_way,
)  # fmt: skip
WRONG: Final = {
    reads_at_once: "aten::add.Tensor on stream 1 reads what stream 0 wrote, at ",
    waited_too_early: "aten::add.Tensor on stream 1 reads what stream 0 wrote",
    writes_what_another_reads: "aten::zero_ on stream 0 writes what stream 1 read",
    frees_what_another_reads: "memory of stream 0 is freed that stream 1 uses",
    uses_a_thread_s_result_before_it_is_known: "reads what stream 1 wrote",
    waits_for_the_whole_device: "waits for the whole device",
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    install()
    for right in RIGHT:
        assert not (said := found(right)), f"{right.__name__}: {said}"
    for wrong, words in WRONG.items():
        assert words in (said := found(wrong)), f"{wrong.__name__}: {said}"
    print("streams in 0 s")
