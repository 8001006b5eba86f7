# Prompts written from the fields of a row, as benchmarks ask them. Jinja, since that is what chat templates are written
# in: a field may be left out where a row has none, and the braces of LaTeX stand as they are.

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from drafters.errors import ConfigError, DataError

__all__ = ["check_template", "compile_template", "render"]

_ENVIRONMENT = SandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=lambda value: "" if value is None else value
)


def check_template(text: str) -> None:
    """Raises ConfigError when `text` is no Jinja, or uses no field of the row."""
    try:
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
    except TemplateSyntaxError as error:
        raise ConfigError(f"source.template: got {text!r}; it is not Jinja: {error.message}") from error
    if not used:
        raise ConfigError(
            f"source.template: got {text!r}, which uses no field of the rows; accepted: text with fields in double "
            "braces, such as {{ prompt }}"
        )


def compile_template(text: str) -> Template:
    """The template, ready for `render`."""
    return _ENVIRONMENT.from_string(text)


def render(template: Template, row: Mapping[str, Any], *, where: str) -> str:
    """The prompt of a row. Raises DataError for a field that it has not."""
    try:
        return template.render(row)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"source.template: {where}: {error}; its columns: {', '.join(sorted(map(str, row))) or 'none'}"
        ) from error
