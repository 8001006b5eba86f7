# The one place where a YAML node becomes a typed object. A node names a class by `_target_`; the class's nested
# dataclass `Config` (or the class itself, if it is a dataclass) types the rest. There is no registry: the path is it.

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafters.errors import ConfigError

__all__ = ["build_config", "locate", "suited", "to_plain", "typed"]

# What a person can write in a command, and what it is called in errors.
WRITTEN = {bool: "true, false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def locate(path: str, *, key: str = "_target_") -> Any:
    """The object at a dotted path. Raises ConfigError naming `key` when there is none."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{key}: '{path}' is not a dotted path; write package.module.ClassName")
    # Files of strangers name paths, too, and some modules do things when they are imported.
    if module.partition(".")[0] in sys.stdlib_module_names or "__main__" in module.split("."):
        raise ConfigError(f"{key}: '{path}' is of Python itself and not imported; accepted: a class of a package")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{key}: no module '{error.name}' for '{path}'; is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ConfigError(f"{key}: module '{module}' has no '{name}'; write one of its classes") from error


def typed(schema: type, node: Any, *, key: str) -> Any:
    """An instance of the dataclass `schema` filled from `node` (mapping or DictConfig; `_target_` is left out).

    `key` is where the node stands, "" at the top. Lists become the tuples that annotations ask for, mappings the
    dataclasses. Raises ConfigError that names the dotted key for an unknown field, a wrong type or a missing value.
    """
    plain = {} if (found := to_plain(node)) is None else found
    names = [f.name for f in fields(schema)]
    prefix = f"{key}." if key else ""
    if not isinstance(plain, dict):
        raise ConfigError(f"{key}: got {plain!r}; expected settings by name: {', '.join(names)}, or null")
    given = {name: value for name, value in plain.items() if name != "_target_"}
    for name in given:
        if name not in names:
            raise ConfigError(f"{prefix}{name}: unknown setting; accepted: {', '.join(names)}")
    for f in fields(schema):
        if given.get(f.name, f.default) == "???" or (f.name not in given and _is_required(f)):
            raise ConfigError(f"{prefix}{f.name}: missing; it has no default")
    # One level at a time: OmegaConf cannot merge into a frozen dataclass inside another.
    inner = {
        name: typed(inner_schema, given.pop(name), key=f"{prefix}{name}")
        for name, inner_schema in _nested(schema).items()
        if given.get(name) is not None
    }
    try:
        return schema(**_typed_values(schema, given, prefix=prefix), **inner)
    except ValueError as error:  # raised by __post_init__ checks of the dataclass
        is_named = str(error).partition(":")[0] in names
        raise ConfigError(f"{prefix if is_named else f'{key}: ' if key else ''}{error}") from error


def build_config(node: Any, *, key: str, base: type | None = None) -> tuple[type, Any]:
    """(class, config instance) of a node with `_target_`. The class's `Config` types the rest of the node. With `base`
    the class has to be one of it: a file that another person wrote may name any class that is installed."""
    plain = to_plain(node)
    if not isinstance(plain, dict) or "_target_" not in plain:
        raise ConfigError(
            f"{key}: needs a `_target_` that names a class, such as package.module.ClassName; add it to its YAML"
        )
    cls = locate(plain["_target_"], key=f"{key}._target_")
    schema = cls if is_dataclass(cls) else getattr(cls, "Config", None)
    if not isinstance(cls, type) or not isinstance(schema, type) or not is_dataclass(schema):
        raise ConfigError(f"{key}._target_: '{plain['_target_']}' is no class with a dataclass `Config`")
    if base is not None and not issubclass(cls, base):
        raise ConfigError(f"{key}._target_: '{plain['_target_']}' is no {base.__name__}; accepted: a class that is")
    return cls, typed(schema, plain, key=key)


def suited(node: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """The plain settings `node` of an object that its `_target_` makes, as the signature of that wants them: a number
    where it wants text is text. Raises ConfigError for a value that is of none of the annotated kinds; what is
    annotated with more than a person can write as one word is left to the object."""
    made: Callable[..., Any] = locate(node["_target_"], key=f"{key}._target_")
    found = dict(node)
    for name, parameter in inspect.signature(made).parameters.items():
        kinds = _written(parameter.annotation)
        if name not in node or not kinds:
            continue
        value = node[name]
        if type(value) in kinds or (value is None and parameter.default is None):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and str in kinds:
            found[name] = str(value)
        elif not (type(value) is int and float in kinds):
            raise ConfigError(f"{key}.{name}: got {value!r}; accepted: {_accepted(kinds)}")
    return found


def _accepted(kinds: set[Any]) -> str:
    """Those of `kinds` that a person can write, in words."""
    return ", ".join(text for kind, text in WRITTEN.items() if kind in kinds)


def _written(annotation: Any) -> set[type]:
    """The kinds of WRITTEN that an annotation is made of; none where it is made of others too."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {str if one in (Path, PathLike) else one for one in parts}
    return kinds if all(isinstance(one, type) and one in WRITTEN for one in kinds) else set()


def to_plain(node: Any) -> Any:
    """Plain dicts and lists of an OmegaConf node, interpolations resolved; other values as they are."""
    if isinstance(node, DictConfig | ListConfig):
        try:
            return OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{error.full_key}: {reason}; give another value for it in the command") from error
    return node


def _is_required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _nested(schema: type) -> dict[str, type]:
    """Fields that hold another dataclass, `X` or `X | None`."""
    hints = get_type_hints(schema)
    options = {f.name: (hints[f.name], *get_args(hints[f.name])) for f in fields(schema)}
    return {name: h for name, hs in options.items() for h in hs if isinstance(h, type) and is_dataclass(h)}


def _typed_values(schema: type, given: dict[str, Any], *, prefix: str) -> dict[str, Any]:
    """`given`, checked and converted to what the fields of `schema` are annotated with."""
    hints = get_type_hints(schema)
    for name, value in given.items():
        # OmegaConf makes true of 7, and "True" of true; that it takes on, off, yes and no is fine.
        kinds = {hints[name], *get_args(hints[name])}
        wants, is_bool = bool in kinds, isinstance(value, bool)
        if (wants and isinstance(value, int | float) and not is_bool) or (is_bool and not wants and str in kinds):
            raise ConfigError(f"{prefix}{name}: got {value!r}; accepted: {_accepted(kinds)}")
        parts = get_args(hints[name])
        is_counted = get_origin(hints[name]) is tuple and ... not in parts
        if is_counted and isinstance(value, list | tuple) and len(value) != len(parts):
            raise ConfigError(f"{prefix}{name}: got {list(value)!r}; accepted: {len(parts)} values")
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(schema), given)
        values = {name: to_plain(merged[name]) for name in given}
    except OmegaConfBaseException as error:
        where = error.full_key or ""
        got = OmegaConf.select(OmegaConf.create(given), where) if where else given
        name = f"{prefix}{where}" if where else prefix.rstrip(".")
        raise ConfigError(f"{name}: got {got!r}; {str(error).splitlines()[0]}") from error
    return {k: tuple(v) if isinstance(v, list) and "tuple" in str(hints[k]) else v for k, v in values.items()}
