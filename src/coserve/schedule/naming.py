"""Content names of pages: equal names mean equal keys and values.

The keys and values of a token depend on every token before it, on the base and on the adapter version, of
which the modules up to the last keys and values count. So a page's name is a digest of the previous page's
name and its own tokens; the first digest (`root`) covers base, adapter version and scope. The scope keeps
tenants from learning each other's prompts by timing cache hits. Pages before the token from which on an
adapter acts have the base's names; the version enters into that of the page with this token (`activated`).

Sixteen bytes of BLAKE2b: finding a collision takes some 2^64 trials. A prompt of 1,000 tokens in pages of 16
takes 0.24 ms.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from coserve.core.request import Request

_BYTES = 16


def root(request: Request) -> bytes:
    """The name before a request's first own page."""
    digest = blake2b(digest_size=_BYTES)
    is_base = request.of_base or request.active_from > 0
    chain = "" if is_base else request.adapter or ""
    for part in (request.scope or "", request.base, chain, str(request.virtual)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # or "ab", "c" would be "a", "bc"
        digest.update(encoded)
    return digest.digest()


def activated(before: bytes, request: Request) -> bytes:
    """The name before the page from which on a request's adapter acts; that of the page before it where the
    adapter acts on all or its keys and values are the base's."""
    if not request.active_from or request.of_base:
        return before
    acts = f"{request.active_from} {request.adapter}".encode()
    return blake2b(before + acts, digest_size=_BYTES).digest()


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page with these tokens that follows the page named `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=_BYTES).digest()


def virtual_names(request: Request, pages: int) -> list[tuple[str, str, int]]:
    """Names of the pages of the virtual tokens that a request's adapter version has."""
    assert request.adapter is not None, "virtual tokens are an adapter's"
    return [("virtual", request.adapter, index) for index in range(pages)]
