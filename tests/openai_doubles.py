# A server with OpenAI's chat completions in this process, whose answers depend on what it is asked alone, and which
# goes wrong by script.

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from data.regenerate import run
from tests.door_world import settings, write_rows

MODEL = "smollm2"
ROWS = [
    {"id": "a", "turns": ["Sky?"], "split": "train"},
    {"id": "b", "turns": ["Grass?", "And sea?", "Why?"], "system": "Be kind."},
    {"id": "c", "turns": ["Sky?"]},
    {"id": "d", "turns": ["Once?", "And then?"]},
    {"id": "e", "turns": ["Tool?"]},
]
NUM_TURNS = 8


@dataclass
class Fault:
    """What becomes of one request: a status with headers, a pause in seconds, a broken body, or a changed reply."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    body: bytes | None = None
    missing_bytes: int = 0
    is_closed: bool = False
    message: dict[str, Any] | None = None
    finish_reason: str | None = "stop"
    has_usage: bool = True


class Stub:
    """`faults`: by the text of the last question, what becomes of the first, second, ... request with it; `always`: of
    every further one. `asked`: the requests so far, `keys`: what they said in Authorization."""

    def __init__(self) -> None:
        self.url = ""
        self.models: list[dict[str, Any]] | None = [{"id": MODEL, "object": "model"}]
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.always: dict[str, Fault] = {}
        self.pause = 0.0
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.list_faults: list[Fault] = []
        self.num_lists = 0
        self._lock = threading.Lock()

    def questions(self) -> list[str]:
        """The last question of each request."""
        return [body["messages"][-1]["content"] for body in self.asked]

    def next_fault(self, body: dict[str, Any]) -> Fault:
        with self._lock:
            self.asked.append(body)
            question = body["messages"][-1]["content"]
            if self.faults[question]:
                return self.faults[question].pop(0)
            return self.always.get(question, Fault(pause=self.pause))


def answer_to(body: dict[str, Any]) -> str:
    """A text that any change of the request changes."""
    return "Answer " + hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]


def reply_to(body: dict[str, Any], fault: Fault) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer_to(body), **(fault.message or {})}
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}} if fault.has_usage else {}
    choice = {"index": 0, "message": message, "finish_reason": fault.finish_reason}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice], **usage}


@contextmanager
def serving(port: int = 0) -> Iterator[Stub]:
    """A running stub."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            stub.num_lists += 1
            stub.keys.add(self.headers["Authorization"])
            fault = (
                stub.list_faults.pop(0) if stub.list_faults else Fault(status=200 if stub.models is not None else 404)
            )
            self._send(fault, {"object": "list", "data": stub.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.keys.add(self.headers["Authorization"])
            fault = stub.next_fault(body)
            time.sleep(fault.pause)
            self._send(fault, reply_to(body, fault))

        def _send(self, fault: Fault, reply: dict[str, Any]) -> None:
            if fault.is_closed:
                self.close_connection = True
                return
            text = fault.body if fault.body is not None else json.dumps(reply).encode()
            if fault.status != 200 and fault.body is None:
                text = json.dumps({"error": {"message": f"the stub says {fault.status}"}}).encode()
            try:
                self.send_response(fault.status)
                for name, value in {"Content-Type": "application/json", **fault.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text[: len(text) - fault.missing_bytes])
            except OSError:  # the client gave up, or was killed
                pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", port), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()


def make_door(stub: Stub, folder: Path) -> Callable[..., bytes]:
    """The door with the stub as its engine and ROWS as prompts; gives the bytes that it wrote."""
    write_rows(folder / "p.jsonl", ROWS)

    def answer(*more: str, name: str = "out.jsonl") -> bytes:
        own = ["engine=openai", f"engine.base_url={stub.url}", "engine.timeout=30", "max_new_tokens=9", "seed=3"]
        run(settings("regenerate", *own, f"prompts={folder}/p.jsonl", f"out={folder}/{name}", *more))
        return (folder / name).read_bytes()

    return answer


def rows_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.decode().splitlines()]
