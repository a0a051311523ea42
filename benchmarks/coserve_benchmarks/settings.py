"""Sizes of measurements: lengths, batches, rounds and seconds of every row."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Lengths are in tokens, times in seconds."""

    prompts: int = 16
    prompt: int = 256
    answer: int = 32
    rounds: int = 5
    slow_rounds: int = 5  # against a peer that takes some ten seconds a round

    batch: int = 4
    length: int = 512
    rank: int = 8
    train_rounds: int = 5

    blocking_batch: int = 32
    blocking_length: int = 400
    blocking_prompt: int = 64
    blocking_answer: int = 16
    blocking_requests: int = 60
    blocking_gap: float = 0.2  # mean pause between an answer and the next request

    streams: int = 32  # through HTTP, against as many in the engine
    streams_prompt: int = 64
    streams_answer: int = 64
    streams_rounds: int = 5

    viewers_rounds: int = 9  # with three viewers, and as many without
    viewers_answer: int = 64

    arrivals: float = 2.0  # requests a second whose first byte is waited for, beside two jobs
    arrivals_seconds: float = 60.0
    arrivals_prompt: int = 64
    arrivals_answer: int = 16
    server_batch: int = 4  # of the server's jobs
    server_length: int = 128

    restarts: int = 5

    held_batch: int = 2  # examples whose activations are held
    held_length: int = 1024

    prefix: int = 1000  # tokens that prompts have in common
    prefix_rest: int = 24  # and of its own of each
    cache8_texts: int = 12

    curve_steps: int = 120  # optimizer steps of each method that learns

    seconds: float = 60.0  # of the co-serving run
    metered_seconds: float = 10.0  # of each load on the metered device
    copied_examples: int = 600  # that teach to copy, and answers of a round that do
    copied_answers: int = 20
    slowdown_rounds: int = 5
    slowdown_seconds: float = 20.0  # of either half of a round
    jobs: int = 2
    seed: int = 0


FULL = Settings()
QUICK = Settings(
    rounds=2,
    slow_rounds=1,
    train_rounds=1,
    blocking_requests=10,
    streams_rounds=2,
    viewers_rounds=2,
    arrivals_seconds=15.0,
    restarts=1,
    curve_steps=40,
    seconds=15.0,
    metered_seconds=5.0,
    slowdown_rounds=2,
    slowdown_seconds=10.0,
)
TINY = Settings(
    prompts=4,
    prompt=32,
    answer=8,
    rounds=1,
    slow_rounds=1,
    batch=2,
    length=32,
    train_rounds=1,
    blocking_batch=4,
    blocking_length=40,
    blocking_prompt=16,
    blocking_answer=4,
    blocking_requests=3,
    blocking_gap=0.01,
    streams_prompt=16,
    streams_answer=32,
    streams_rounds=1,
    viewers_rounds=1,
    viewers_answer=400,
    arrivals=20.0,
    arrivals_seconds=2.0,
    arrivals_prompt=16,
    arrivals_answer=8,
    server_length=32,
    restarts=1,
    prefix=70,
    prefix_rest=3,
    cache8_texts=2,
    held_length=64,
    curve_steps=6,
    seconds=1.0,
    metered_seconds=1.0,
    copied_examples=16,
    copied_answers=2,
    slowdown_rounds=1,
    slowdown_seconds=1.0,
)


def settings_for(shape: str, quick: bool) -> Settings:
    """The full sizes; `quick` runs them less often, and shrinks them for the tiny shape."""
    if not quick:
        return FULL
    return TINY if shape == "tiny" else QUICK
