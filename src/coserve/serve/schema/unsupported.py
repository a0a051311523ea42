"""Parameters of OpenAI's API, and of vLLM's, that this server does not support: refused by name, never
ignored."""

from collections.abc import Mapping
from typing import Any, Final

from coserve.serve.errors import ApiError

# The values that ask for nothing, and may therefore stand there; null is one for all.
_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "add_special_tokens": (False,),  # a template has its own
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
}
_SAMPLING: Final[Mapping[str, tuple[Any, ...]]] = {  # vLLM's, with its defaults
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True, False),  # fast tokenizers know no difference
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "repetition_detection": (),
    "priority": (0,),
}
_COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = {"add_special_tokens": (True,)}
_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "function_call": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
}


def without_unsupported_chat(body: Any) -> Any:
    """The body without unsupported parameters that have no effect. Raises ApiError 400 for any other."""
    return without(body, _CHAT)


def without_unsupported_sampling(body: Any) -> Any:
    """As `without_unsupported_chat`, for parameters of chats and texts."""
    return without(body, _SAMPLING)


def without_unsupported_completion(body: Any) -> Any:
    """As `without_unsupported_chat`, for texts to go on with."""
    return without(body, _COMPLETION)


def without_unsupported_message(message: Any) -> Any:
    """As `without_unsupported_chat`, for one message."""
    if isinstance(message, dict) and message.get("role") == "function":
        raise refusal("function", "messages")
    return without(message, _MESSAGE, "messages")


def refuse_part(kind: str) -> None:
    """Raises for content that is neither text nor a call."""
    raise ApiError(
        400, f"Content of type '{kind}' is not supported by this server.",
        param="messages", code="unsupported_parameter",
    )  # fmt: skip


def refuse_tool(kind: str) -> None:
    """Raises for a tool that a server would run itself."""
    raise ApiError(
        400, f"Tools of type '{kind}' are not supported by this server; only the caller's own are.",
        param="tools", code="unsupported_parameter",
    )  # fmt: skip


def without(body: Any, table: Mapping[str, tuple[Any, ...]], param: str | None = None) -> Any:
    """A body, or a part of it at `param`, without the parameters in a table, which has the values of each
    that ask for nothing. Raises ApiError 400 for any other value."""
    if not isinstance(body, dict):
        return body
    for name, idle in table.items():
        if name in body and body[name] is not None and body[name] not in idle:
            raise refusal(name, param or name)
    return {name: value for name, value in body.items() if name not in table}


def refusal(name: str, param: str) -> ApiError:
    """The error for a parameter that is not supported."""
    message = f"Unsupported parameter: '{name}' is not supported by this server."
    return ApiError(400, message, param=param, code="unsupported_parameter")
