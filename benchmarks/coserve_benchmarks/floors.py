"""Lower bounds of the bytes and operations that a model's steps take."""

from coserve.workload.shapes import ModelShape


def decode_bytes(shape: ModelShape, sequences: int, context: int) -> int:
    """Bytes one decode step must read: every linear once, and the keys and values of `context` tokens for
    each of its sequences."""
    cached = 2 * shape.layers * shape.hidden * shape.groups // shape.heads * context * sequences
    return shape.item_bytes * (shape.layer_weights + shape.head_weights + cached)


def prefill_flops(shape: ModelShape, prompts: int, length: int) -> int:
    """Operations of prefill for prompts of `length` tokens; only their last rows pass the head."""
    linears = prompts * (length * shape.layer_weights + shape.head_weights)
    return 2 * linears + 2 * pairs_flops(shape, prompts, length)


def train_flops(shape: ModelShape, examples: int, length: int, rank: int, recompute: bool) -> int:
    """Operations of a training step: forward and the input gradients of every frozen weight, an adapter's
    forward and both its gradients, and attention (two products forward, five backward). With `recompute`
    the layers' forward runs twice."""
    rows = examples * length
    frozen = 2 * 2 * (shape.layer_weights + shape.head_weights)
    again = 2 * shape.layer_weights if recompute else 0
    return rows * (frozen + again + 6 * shape.lora_weights(rank)) + 7 * pairs_flops(shape, examples, length)


def pairs_flops(shape: ModelShape, sequences: int, length: int) -> int:
    """Operations of one product over all causal (row, earlier row) pairs, all layers and heads."""
    return shape.layers * shape.hidden * sequences * length * (length + 1)
