"""Who asks: an API key's tenant, or, on a machine of one's own without keys, the tenant `local`."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from coserve.serve.errors import ApiError
from coserve.serve.state import Shared
from coserve.serve.store.records import Tenant
from coserve.serve.store.tenants import LOCAL

_bearer = HTTPBearer(auto_error=False, description="An API key, as `coserve keys create` prints it once.")


async def tenant_of(
    request: Request,
    state: Shared,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Tenant:
    """FastAPI's dependency for the tenant. Raises ApiError 401.

    While no key exists and none is required, whatever stands in the header is ignored: clients insist on
    sending something.
    """
    secret = None if given is None else given.credentials
    if secret is not None and (tenant := await state.store.tenant_of(secret)) is not None:
        return tenant
    may_be_local = not state.settings.require_keys and _is_from_here(request, state)
    if may_be_local and not await state.store.tenants.any_keys():
        return LOCAL
    if secret is None:
        message = "You didn't provide an API key: send it as 'Authorization: Bearer KEY'."
        raise ApiError(401, message, code="missing_api_key")
    raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")


def _is_from_here(request: Request, state: Shared) -> bool:
    """Not a web page of another site, which a browser on this machine would send here as well."""
    if not (state.settings.is_loopback or state.settings.allow_insecure):
        return False
    origin = request.headers.get("origin")
    return origin is None or origin == f"{request.url.scheme}://{request.headers.get('host', '')}"


Caller = Annotated[Tenant, Depends(tenant_of)]
