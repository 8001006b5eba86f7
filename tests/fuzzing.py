# Damage for tests of readers: a file as it was written, changed in one place as disks, cut copies, editors and foreign
# tools change files, and what a reader has to make of it: the same as before, or one error of ours that names the file.

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, configuration, settings
from hypothesis import strategies as st

from drafters.errors import DraftersError

# What hypothesis keeps of the code that it has seen is nothing for a checkout.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir(), "drafters-hypothesis"))

DEEP = b"[" * 100_000
FOREIGN = (
    *(b"", b"\0", b"{}", b"[]", b"null", b"7", b'"text"', DEEP, b'{"a":' * 50_000, b"PK\x03\x04" + b"\0" * 60),
    *(b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"GGUF\x03\0\0\0", b"\xff\xfe{\0}\0", b"PAR1" * 8, b'{"a": 1, "a": 2}'),
    b'\x08\0\0\0\0\0\0\0{"a":{}}',
)
VALUES = (None, True, -1, 0, 1, 2**63, 10**400, 0.5, -1.5, float("nan"), float("inf"), "", "no", "../x", [], {}, [[1]])


def profile(max_examples: int) -> Any:
    """Settings of hypothesis: the same examples each time, whatever the machine's speed."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class Reader:
    """`read` makes something comparable of the folder at `folder`; `files` in it may be damaged."""

    folder: Path
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    expected: Any = None
    counts: dict[str, int] = field(default_factory=lambda: {"refused": 0, "right": 0})

    def __post_init__(self):
        self.expected = self.read(self.folder)

    def check(self, name: str, change: "Callable[[Path], Any]") -> None:
        """One damage, looked at, and mended again."""
        with mended(self.folder / name) as path:
            before = path.read_bytes()
            change(path)
            is_same = path.is_file() and path.read_bytes() == before
            text, found = None, None
            try:
                found = self.read(self.folder)
            except DraftersError as error:
                text = str(error)
            if text is not None:
                assert not is_same, f"the undamaged {name} is refused: {text}"
                # Named by itself, by the file that lists it, or by its folder; and then what to do.
                assert any(one in text for one in (*self.files, self.folder.name)), f"no file in: {text}"
                assert len(text) < 1500, text
                assert "\n" not in text.strip(), text
                self.counts["refused"] += 1
                return
        assert found == self.expected, f"another result of {name}, without a word"
        self.counts["right"] += 1


@contextmanager
def mended(path: Path) -> Iterator[Path]:
    """The file as it was, afterwards."""
    before = path.read_bytes()
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(before)


def changes(name: str) -> st.SearchStrategy:
    """Ways to damage a file of this name."""
    place = st.floats(0, 1, exclude_max=True)
    kinds = [
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("cut"), place, st.just(0)),
        st.tuples(st.just("hole"), place, st.integers(1, 40)),
        st.tuples(st.just("twice"), place, st.integers(1, 40)),
        st.tuples(st.just("foreign"), st.sampled_from(FOREIGN), st.just(0)),
        st.tuples(st.just("folder"), st.just(0), st.just(0)),
    ]
    if name.endswith(".json"):
        kinds += [st.tuples(st.just("value"), place, st.sampled_from(VALUES))] * 3
        kinds += [st.tuples(st.just(kind), place, st.just(0)) for kind in ("key", "drop", "double")]
    return st.one_of(kinds)


def damage(path: Path, change: tuple[str, Any, Any]) -> None:
    """Damage the file as one of `changes` says."""
    kind, place, more = change
    raw = path.read_bytes()
    if kind == "folder":
        path.unlink()
        path.mkdir()
        return
    at = int(place * len(raw)) if isinstance(place, float) else 0
    if kind == "foreign":
        raw = place
    elif kind == "flip":
        raw = raw[:at] + bytes([raw[at] ^ 1 << more]) + raw[at + 1 :]
    elif kind == "cut":
        raw = raw[:at]
    elif kind == "hole":
        raw = raw[:at] + b"\0" * len(raw[at : at + more]) + raw[at + more :]
    elif kind == "twice":
        raw = raw[: at + more] + raw[at:]
    else:
        raw = _edited(raw, kind, place, more)
    path.write_bytes(raw)


def _edited(raw: bytes, kind: str, place: float, value: Any) -> bytes:
    """JSON with one entry changed."""
    whole = json.loads(raw)
    places = list(_places(whole))
    node, key = places[int(place * len(places))]
    if kind == "value":
        node[key] = value
    elif kind == "drop":
        del node[key]
    elif isinstance(node, list):
        node.insert(key, node[key])
    elif kind == "key":
        node[f"{key}_"] = node.pop(key)
    else:
        text = json.dumps(whole)
        return text.replace("{", "{" + json.dumps(str(key)) + ": 0, ", 1).encode()
    return json.dumps(whole).encode()


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)
