# What every door does around its work: what Hydra, its parser of arguments and OmegaConf say of a wrong command becomes
# one line that names the key, what is accepted and what to do. HYDRA_FULL_ERROR=1 shows their own words and where.

import os
import re
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from drafters.errors import ConfigError

__all__ = ["begin"]

FULL = "HYDRA_FULL_ERROR"
# Before a door's own work begins all errors are of what was asked for, whatever their class.
OF_COMMANDS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
)
SYNTAX = "write key=value; [a,b] for a list, {a: 1} for settings by name, and \"key='some text'\" for text with signs"


def begin(main: Callable[[], None]) -> None:
    """Run a door, the function that `hydra.main` made. Exits with one line and status 1 where the command is wrong."""
    from drafters.door import door

    if os.environ.get(FULL) == "1":
        main()
        return
    with door():
        _check_arguments()
        os.environ[FULL] = "1"
        try:
            main()
        except OF_COMMANDS as error:
            work = vars(main)["__wrapped__"].__code__
            has_begun = any(frame.f_code is work for frame, _ in traceback.walk_tb(error.__traceback__))
            if has_begun and not isinstance(error, HydraException | OmegaConfBaseException):
                raise
            raise ConfigError(_told(error)) from error
        finally:
            os.environ.pop(FULL, None)


def _check_arguments() -> None:
    """Raises ConfigError for options, such as --config-dir, that Hydra does not know or cannot take together."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --hydra-help for what is accepted; settings are written key=value")

    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_args()
    if given.resolve and given.cfg is None:
        raise ConfigError("--resolve: it goes with --cfg job, which prints the settings instead of running")
    if given.package is not None and given.cfg is None:
        raise ConfigError(f"--package: got {given.package!r} without --cfg, which it is for; leave it out")
    modes = ("run", "cfg", "multirun", "shell_completion", "info")
    if len(both := [f"--{name}" for name in modes if getattr(given, name)]) > 1:
        raise ConfigError(f"{both[0]}: got {' and '.join(both)}, which exclude each other; leave one of them")


def _told(error: BaseException) -> str:
    """One line of what is wrong."""
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read: {_reason(error)}; {SYNTAX}"
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, SearchPathException):
        return f"--config-dir: {_line(error)}; give an existing folder with groups in it, such as drafter/mine.yaml"
    if isinstance(cause, OmegaConfBaseException):
        return _refused(cause, _line(error))
    if isinstance(error, OmegaConfBaseException):
        return _refused(error, "")
    if isinstance(error, YAMLError):
        return f"a YAML file cannot be read: {_line(error)}; mend it"
    if isinstance(error, OSError) and error.filename:
        return (
            f"{error.filename}: {error.strerror}; choose another folder (outputs=, hydra.run.dir= or hydra.sweep.dir=)"
        )
    return _line(error).removeprefix("error: ")


def _missing(error: MissingConfigException) -> str:
    """Of a group or an option that is not there."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    where = re.match(r"In '([^']+)'", str(error))
    of = f" (from {where[1]})" if where and "/" in where[1] else ""
    if not group:
        return f"--config-name: got '{option}', and there is no such file{of}; leave it out"
    return f"{group}: got '{option}'{of}; {_choices(option, error.options or ())}"


def _refused(error: OmegaConfBaseException, before: str) -> str:
    """Of a setting that cannot be there or cannot be worked out."""
    key, parent = error.full_key or "", error.parent_node
    if isinstance(error, GrammarParseError):
        return f"{key or 'a value'}: cannot be read: {_reason(error)}; {SYNTAX}"
    if (
        isinstance(error, KeyError | AttributeError)
        and isinstance(parent, DictConfig)
        and "not in struct" in str(error)
    ):
        names = [str(name) for name in parent]
        return f"{key}: unknown setting or group; {_choices(key.rpartition('.')[2], names)}"
    kind = "a list; give all of it, as in key=[1,2]" if isinstance(parent, ListConfig) else ""
    reason = _reason(error)
    return f"{key or before}: {reason}{'; it is in ' + kind if kind else ''}; give another value for it in the command"


def _choices(got: str, names: Iterable[str]) -> str:
    """What is accepted in the place of `got`, and which of it was meant perhaps."""
    known = sorted(name for name in names if name != "hydra")
    near = get_close_matches(got, known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"accepted: {', '.join(known) or 'none'}{meant}"


def _reason(error: BaseException) -> str:
    """The first line of an error, which says what; others say where in Hydra."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _line(error: BaseException) -> str:
    """All of an error in one line, without the links to Hydra's pages."""
    lines = [line.strip() for line in str(error).splitlines() if "https://hydra.cc" not in line]
    return " ".join(line for line in lines if line) or _reason(error)
