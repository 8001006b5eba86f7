# JSON as this project reads and seals it. A reader takes text that says one thing: what is nested without end, or names
# a key twice, is malformed. A seal is a checksum inside the file: a changed number is not taken for the old one.

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["parse", "sealed", "unsealed"]

SEAL = "checksum"


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError where it is malformed, nested too deep, or has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, as JSON has them, with a checksum of all as the last one."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return {**plain, SEAL: _digest(plain)}


def unsealed(values: Any) -> dict[str, Any]:
    """The values that were sealed; those without a seal, as earlier versions wrote them, as they are. Raises ValueError
    where they are no object, or the checksum is not theirs."""
    if not isinstance(values, dict):
        raise ValueError("it should hold an object")
    rest = {name: value for name, value in values.items() if name != SEAL}
    if SEAL in values and values[SEAL] != _digest(rest):
        raise ValueError(f"its values are not those that its '{SEAL}' is of; the file was damaged or edited")
    return rest


def _digest(values: Mapping[str, Any]) -> str:
    """sha256 (hex) of the canonical text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key '{next(name for name in names if names.count(name) > 1)}' twice")
    return found
