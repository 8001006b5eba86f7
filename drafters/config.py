# The one place where a YAML node becomes a typed object. A node names a class by `_target_`; the class's nested
# dataclass `Config` (or the class itself, if it is a dataclass) types the rest. There is no registry: the path is it.

import importlib
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafters.errors import ConfigError

__all__ = ["build_config", "locate", "to_plain", "typed"]


def locate(path: str, *, key: str = "_target_") -> Any:
    """The object at a dotted path. Raises ConfigError naming `key` when there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{key}: '{path}' is not a dotted path; write package.module.ClassName")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and not module.startswith(error.name):
            raise
        raise ConfigError(f"{key}: no module '{error.name}' for '{path}'; is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ConfigError(f"{key}: module '{module}' has no '{name}'") from error


def typed(schema: type, node: Any, *, key: str) -> Any:
    """An instance of the dataclass `schema` filled from `node` (mapping or DictConfig).

    Raises ConfigError that names the dotted key for an unknown field, a wrong type or a missing value.
    """
    node = OmegaConf.create(to_plain(node) or {})
    node.pop("_target_", None)
    accepted = ", ".join(f.name for f in fields(schema))
    unknown = [str(name) for name in node if name not in {f.name for f in fields(schema)}]
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]}: unknown setting; accepted: {accepted}")
    required = [f.name for f in fields(schema) if f.default is MISSING and f.default_factory is MISSING]
    for name in required:
        if name not in node:
            raise ConfigError(f"{key}.{name}: missing; it has no default")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(_open(schema)), node)
        return _freeze(schema, OmegaConf.to_container(merged, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        where = ".".join(part for part in (key, error.full_key or "") if part)
        got = OmegaConf.select(node, error.full_key) if error.full_key else None
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{where}: got {got!r}; {first_line}") from error
    except ValueError as error:  # raised by __post_init__ checks of the dataclass
        raise ConfigError(f"{key}: {error}") from error


def build_config(node: Any, *, key: str) -> tuple[type, Any]:
    """(class, config instance) of a node with `_target_`. The class's `Config` types the rest of the node."""
    plain = to_plain(node)
    if not isinstance(plain, dict) or "_target_" not in plain:
        raise ConfigError(f"{key}: needs a `_target_` that names a class")
    cls = locate(plain["_target_"], key=f"{key}._target_")
    schema = cls if is_dataclass(cls) else cls.Config
    return cls, typed(schema, plain, key=key)


def to_plain(node: Any) -> Any:
    """Plain dicts and lists of an OmegaConf node, interpolations resolved; other values as they are."""
    if isinstance(node, DictConfig | ListConfig):
        return OmegaConf.to_container(node, resolve=True)
    return node


def _open(schema: type) -> type:
    # OmegaConf marks frozen dataclasses read-only, which forbids the merge: drop that by structuring field by field.
    return schema


def _freeze(schema: type, values: dict[str, Any]) -> Any:
    """Dataclass instances, nested ones included, with lists turned into the tuples that annotations ask for."""
    hints = get_type_hints(schema)
    done = {}
    for f in fields(schema):
        value, hint = values[f.name], hints[f.name]
        nested = [h for h in (hint, *getattr(hint, "__args__", ())) if is_dataclass(h)]
        if nested and isinstance(value, dict):
            value = _freeze(nested[0], value)
        elif isinstance(value, list) and "tuple" in str(hint):
            value = tuple(value)
        done[f.name] = value
    return schema(**done)
