"""Who asks: an API key's tenant, or, on a machine of one's own without keys, the tenant `local`."""

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from coserve.serve.errors import ApiError
from coserve.serve.state import Shared, State
from coserve.serve.store.records import Tenant
from coserve.serve.store.tenants import LOCAL

_bearer = HTTPBearer(auto_error=False, description="An API key, as `coserve keys create` prints it once.")


async def tenant_of(
    state: Shared,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Tenant:
    """FastAPI's dependency for the tenant. Raises ApiError 401.

    While no key ever existed and none is required, whatever stands in the header is ignored: clients insist
    on sending something. Hosts and origins of web pages are looked at before (`browsers.py`).
    """
    secret = None if given is None else given.credentials
    if secret is not None and (tenant := await state.store.tenant_of(secret)) is not None:
        return tenant
    if await serves_without_keys(state):
        return LOCAL
    if secret is None:
        message = "You didn't provide an API key: send it as 'Authorization: Bearer KEY'."
        raise ApiError(401, message, code="missing_api_key")
    raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")


async def serves_without_keys(state: State) -> bool:
    """Whether everybody who reaches the server is the tenant `local`."""
    settings = state.settings
    may_be_open = (settings.is_loopback or settings.allow_insecure) and not settings.require_keys
    return may_be_open and await state.store.tenants.is_open()


Caller = Annotated[Tenant, Depends(tenant_of)]
