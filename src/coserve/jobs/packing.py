"""Packs examples into micro-batches, by their lengths alone."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Micro-batches, as indices into `lengths`, of at most `max_rows` rows; examples stay whole.

    First fit, longest first, which fills them well. Indices ascend within a micro-batch, and micro-batches by
    their first index. An example longer than `max_rows` gets a micro-batch of its own.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((at for at, left in enumerate(room) if lengths[i] <= left), None)
        if fits is None:
            packs.append([i])
            room.append(max_rows - lengths[i])
        else:
            packs[fits].append(i)
            room[fits] -= lengths[i]
    return sorted(sorted(indices) for indices in packs)
