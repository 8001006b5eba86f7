# One server with OpenAI's chat completions, as `python -m data.regenerate engine=openai` talks to it. The `openai`
# client sends, waits and retries; here every reply is checked, and every error becomes either that of one prompt
# (RowFailed) or one that ends the job (ConfigError). The key is never part of a message.

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from drafters.errors import ConfigError

if TYPE_CHECKING:
    import httpx2
    import openai

__all__ = ["ChatServer", "Reply", "RowFailed", "Served"]

# How servers say that an answer ended by itself, and that it was cut at its length limit.
FINISH_REASONS = {"stop": "stop", "eos_token": "stop", "length": "length"}
CONNECT_SECONDS, LIST_SECONDS = 10.0, 30.0
NO_KEY = "none"


class RowFailed(Exception):
    """A prompt that got no answer. `reason` is the short form that reports count; what is `temporary` may pass."""

    def __init__(self, reason: str, detail: str = "", *, temporary: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.temporary = temporary


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that a server has: its name, and the path or hub id that it was loaded from where the server says so."""

    name: str
    root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer; `num_tokens` is 0 where the server does not count them. `reasoning` had a field of its own."""

    content: str
    finish_reason: str
    num_tokens: int
    has_reasoning: bool


class ChatServer:
    """A server at `base_url`. Use it as an asynchronous context manager."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout: float, retries: int) -> None:
        import httpx2
        import openai

        self.base_url, self._key = base_url, api_key
        limits = httpx2.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout), pool=None)
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or NO_KEY,
            timeout=limits,
            max_retries=retries,
            http_client=openai.DefaultAsyncHttpxClient(timeout=limits, event_hooks={"response": [_check_reply]}),
        )

    async def __aenter__(self) -> "ChatServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def find_model(self, name: str | None) -> Served:
        """The model called `name`, or the server's only one. Raises ConfigError when there is none, or no server."""
        import openai

        try:
            models = await self._models()
        except openai.NotFoundError:
            if name is not None:
                return Served(name=name)
            raise ConfigError(
                f"engine.base_url: {self.base_url} has no list of models; give the address as far as /v1, or "
                "engine.model= if the server keeps no list"
            ) from None
        found = {one.name: one for one in models}
        listed = ", ".join(sorted(found)) or "none"
        if name is None:
            if len(found) != 1:
                raise ConfigError(f"engine.model: null, but {self.base_url} has {len(found)} models; choose: {listed}")
            return models[0]
        if name not in found:
            raise ConfigError(f"engine.model: {self.base_url} has no '{name}'; it has: {listed}")
        return found[name]

    async def ask(self, messages: list[dict[str, str]], **fields: Any) -> Reply:
        """The answer to `messages`; `fields` go into the request. Raises RowFailed, and ConfigError when the server
        refuses us or is gone."""
        create = self._client.chat.completions.with_raw_response.create
        request: dict[str, Any] = {"messages": messages, **fields}
        raw = await self._translated(create(**request))
        return _reply_of(raw.http_response.json())

    async def _models(self) -> list[Served]:
        """Its models. At the very start a server that is not there is no reason to wait, an overloaded one is."""
        import openai

        patient = self._client.with_options(timeout=LIST_SECONDS)
        try:
            reply = await patient.with_options(max_retries=0).models.with_raw_response.list()
        except (openai.InternalServerError, openai.RateLimitError):
            reply = await self._listed(patient)
        except openai.APIConnectionError as error:
            raise ConfigError(
                f"engine.base_url: no answer from {self.base_url} ({_cause(error)}); start the server, or give its "
                "address"
            ) from None
        except openai.NotFoundError:
            raise
        except openai.APIStatusError as error:
            self._refused(error)
        try:
            entries = reply.http_response.json()["data"]
            return [Served(name=str(one["id"]), root=one.get("root") and str(one["root"])) for one in entries]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"engine.base_url: {self.base_url} does not answer as OpenAI's API does; give the address as far as /v1"
            ) from None

    async def _listed(self, client: "openai.AsyncOpenAI") -> Any:
        import openai

        try:
            return await client.models.with_raw_response.list()
        except openai.NotFoundError:
            raise
        except openai.APIStatusError as error:
            self._refused(error)
        except openai.APIConnectionError as error:
            self._gone(error)

    async def _translated(self, sent: Awaitable[Any]) -> Any:
        """What `sent` returns, its errors as RowFailed or ConfigError."""
        import openai

        try:
            return await sent
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            self._refused(error)
        except openai.APIStatusError as error:
            is_temporary = error.status_code in (408, 409, 429) or error.status_code >= 500
            raise RowFailed(f"HTTP {error.status_code}", self._said(error), temporary=is_temporary) from None
        except openai.APITimeoutError:
            await self._check_alive()
            raise RowFailed("no answer within engine.timeout", temporary=True) from None
        except openai.APIConnectionError as error:
            await self._check_alive()
            raise RowFailed("connection broken or reply malformed", _cause(error), temporary=True) from None

    async def _check_alive(self) -> None:
        """Raises ConfigError when the server takes no connection any more; any reply of it will do."""
        import openai

        try:
            await self._client.with_options(max_retries=0, timeout=LIST_SECONDS).models.with_raw_response.list()
        except openai.APIConnectionError as error:
            self._gone(error)
        except openai.APIError:
            pass

    def _gone(self, error: "openai.APIConnectionError") -> NoReturn:
        raise ConfigError(
            f"engine.base_url: {self.base_url} does not answer any more ({_cause(error)}); finished answers are kept: "
            "start the server again, and the same command goes on"
        ) from None

    def _refused(self, error: "openai.APIStatusError") -> NoReturn:
        """The end of a job: what the server says of a key is not repeated, since it may quote the key."""
        if error.status_code in (401, 403):
            sent = "the key of engine.api_key_env" if self._key else "a request without a key (set engine.api_key_env)"
            raise ConfigError(f"engine.api_key_env: {self.base_url} refuses {sent}: HTTP {error.status_code}") from None
        raise ConfigError(
            f"engine.base_url: {self.base_url} says HTTP {error.status_code}: {self._said(error)}; check the address "
            "and engine.model"
        ) from None

    def _said(self, error: "openai.APIStatusError") -> str:
        text = " ".join(str(error.message).split())
        return (text.replace(self._key, "***") if self._key else text)[:240]


async def _check_reply(response: "httpx2.Response") -> None:
    """Takes a reply that is no chat completion for a broken connection, which the client then retries."""
    import httpx2

    if not response.is_success or not response.request.url.path.endswith("/chat/completions"):
        return
    await response.aread()
    try:
        _choice_of(response.json())
    except ValueError as error:
        raise httpx2.RemoteProtocolError(f"malformed reply: {error}", request=response.request) from error


def _choice_of(reply: Any) -> dict[str, Any]:
    """The first choice of a chat completion. Raises ValueError for anything else."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise ValueError(f"no choices with a message in {str(reply)[:120]}")
    texts = [choice["message"].get(name) for name in ("content", "reasoning", "reasoning_content")]
    for text in (*texts, choice.get("finish_reason")):
        if not isinstance(text, str | None):
            raise ValueError("its content or finish_reason is no text")
        (text or "").encode()  # ValueError for half a surrogate pair, which no file can hold
    return choice


def _reply_of(reply: dict[str, Any]) -> Reply:
    """Raises RowFailed for an answer that the target did not end, and for an empty one."""
    choice = _choice_of(reply)
    message, reason = choice["message"], choice.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise RowFailed(f"finish_reason {reason!r}")
    content = message.get("content") or ""
    # vLLM calls it `reasoning`, SGLang and llama.cpp `reasoning_content`.
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if not content.strip() and not (reasoning.strip() and FINISH_REASONS[reason] == "length"):
        raise RowFailed("empty answer")
    if reasoning.strip():
        closed = f"\n</think>\n\n{content.lstrip()}" if content.strip() else ""
        content = f"<think>\n{reasoning.strip()}{closed}"
    usage = reply.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Reply(
        content=content,
        finish_reason=FINISH_REASONS[reason],
        num_tokens=count if isinstance(count, int) else 0,
        has_reasoning=bool(reasoning.strip()),
    )


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:240] or type(cause).__name__
