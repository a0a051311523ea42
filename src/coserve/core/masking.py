"""Secrets in texts that people and logs read: API keys, and passwords and tokens in URLs and parameters."""

import re
from typing import Any, Final

MASK: Final = "***"
_KEY: Final = re.compile(r"(sk-coserve-[\w-]{6})[\w-]+")  # the prefix of a key is no secret
# A password may hold a slash or an at sign that is not escaped: all up to the last at sign is hidden.
# Of a URL that was taken for a path, one slash is left.
_PASSWORD: Final = re.compile(r"(:/{1,2}[^\s/:@\"']*:)[^\s\"']{1,512}@")
_PARAMETER: Final = re.compile(
    r"\b((?:\w{1,40}[-_])?(?:(?:ssl)?password|passwd|passphrase|secret|token|signature|sig|"
    r"(?:api|access|account|secret)[-_]?key)=)(?:'[^']*'|[^&\s\"';]+)",
    re.IGNORECASE,
)
_URL: Final = re.compile(r"([\w+.-]+://)([^:/@]*:.*@|[^/@]*@)?([^/?#]*)(.*)", re.DOTALL)


def masked(text: str) -> str:
    """The text with only the beginnings of API keys, without passwords in URLs and without the values of
    parameters such as `password=`."""
    if "sk-coserve-" in text:
        text = _KEY.sub(r"\1…", text)
    if ":/" in text:
        text = _PASSWORD.sub(rf"\g<1>{MASK}@", text)
    return _PARAMETER.sub(rf"\g<1>{MASK}", text) if "=" in text else text


def masked_value(value: Any, is_secret: bool = False) -> Any:
    """The value of a setting, as JSON has it, in which each text is masked. Of a URL that is a secret itself,
    as a webhook's is, only the scheme and the host are left."""
    if isinstance(value, dict):
        return {key: masked_value(each, is_secret) for key, each in value.items()}
    if isinstance(value, list):
        return [masked_value(each, is_secret) for each in value]
    if not isinstance(value, str) or (url := _URL.fullmatch(value)) is None:
        return masked(value) if isinstance(value, str) else value
    scheme, login, host, path = url.groups("")
    user, colon, _ = login.partition(":")
    login = f"{user}:{MASK}@" if colon else login
    return f"{scheme}{login}{host}{(MASK if path else '') if is_secret else masked(path)}"
