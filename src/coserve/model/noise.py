"""Counter-based randomness: noise that is a pure function of (request seed, position, token).

The hash is splitmix64 (Steele, Lea and Flood, 2014) in int64 tensors, whose products wrap around as unsigned
ones do. So results do not depend on batching, restarts or retries.
"""

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def _xor_shifted(x: Tensor, bits: int) -> None:
    """`x ^= x >>> bits` in place; torch's shift is arithmetic, so a mask clears the sign bits."""
    x ^= (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x: Tensor) -> Tensor:
    """A well-mixed int64 for every int64 of `x`, same shape; a bijection."""
    x = x + _GOLDEN
    _xor_shifted(x, 30)
    x *= _FIRST
    _xor_shifted(x, 27)
    x *= _SECOND
    _xor_shifted(x, 31)
    return x


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, C], for `seeds` [R], `positions` [R] and token ids [R, C]."""
    keys = splitmix64(splitmix64(seeds) + positions)
    bits = splitmix64(keys[:, None] + tokens)
    # 53 bits as a uniform in (0, 1). The largest noise comes from the smallest uniforms, where float32 is
    # finest: even tokens of probability 1e-12 get their share.
    uniform = (((bits >> 11) & (2**53 - 1)) + 1).float().mul_(2.0**-53).clamp_(max=_ALMOST_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
