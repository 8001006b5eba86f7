# What every door does around its work: what Hydra, its parser of arguments and OmegaConf say of a wrong command becomes
# one line that names the key, what is accepted and what to do. HYDRA_FULL_ERROR=1 shows their own words and where.

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from drafters.config import to_plain
from drafters.errors import ConfigError

__all__ = ["CHECKOUT", "CONF", "begin", "check_settings", "launch_in_order"]

CHECKOUT = Path(__file__).resolve().parents[1]
CONF = CHECKOUT / "conf"
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


def begin(main: Callable[[], None], *, prepare: Callable[[], None] | None = None) -> None:
    """Run a door, the function that `hydra.main` made, after `prepare`. Exits with one line and status 1 where the
    command is wrong."""
    from drafters.door import start

    def begun() -> None:
        if prepare is not None:
            prepare()
        if os.environ.get(FULL) == "1":
            main()
        else:
            _run(main)

    start(begun)


def _run(main: Callable[[], None]) -> None:
    """Hydra's function, with its own errors told in one line."""
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


def check_settings(cfg: DictConfig, door: str) -> None:
    """Raises ConfigError for a setting of `cfg`, the whole of a door's, that conf/<door>.yaml does not have: what was
    added with + or by a file of the user's would act on nothing."""
    to_plain(cfg)  # Of an interpolation that leads nowhere Hydra would say where it was met.
    own = OmegaConf.to_container(OmegaConf.load(CONF / f"{door}.yaml"), resolve=False)
    assert isinstance(own, dict)
    chosen = [name for one in own.pop("defaults") if isinstance(one, dict) for name in one]
    groups = {name.partition("@")[2].partition(".")[0] or name for name in chosen if not name.startswith("override ")}
    known = {str(name) for name in own} | groups - {"experiment"}
    for name in map(str, cfg):
        if name not in known:
            raise ConfigError(f"{name}: unknown setting; {_choices(name, known)}")


def launch_in_order() -> None:
    """Let Hydra's launcher say what comes, and end with one line, not with a traceback, where it has no jobs or loses
    them. Checks launchers that experiments name, too."""
    from hydra.core.plugins import Plugins

    Plugins.instance()  # loads the launchers anew: those of before are not the ones that are used
    make = Plugins.instantiate_launcher

    def make_launcher(self: Any, *, config: DictConfig, **given: Any) -> Any:
        from drafters.door import door
        from drafters.launcher import LAUNCHER, check_named

        with door():
            name = check_named(config.hydra.runtime.choices.get(LAUNCHER), is_sweep=True, checkout=CHECKOUT)
        if name is not None:
            sys.stderr.write(
                f"{name}: one job a choice, with its log in outputs/.submitit; squeue --me shows them. This "
                "command waits for them; Ctrl-C ends the waiting, not the jobs.\n"
            )
        launcher = make(self, config=config, **given)
        kind, launch, logs = type(launcher), type(launcher).launch, None if name is None else config.hydra.sweep.dir

        def launch_jobs(self: Any, *jobs: Any, **more: Any) -> Any:
            return _launch_jobs(partial(launch, self), logs, *jobs, **more)

        # Of the class: a launcher that submits jobs sends itself along.
        setattr(kind, "launch", launch_jobs)  # noqa: B010
        return launcher

    setattr(Plugins, "instantiate_launcher", make_launcher)  # noqa: B010


def _launch_jobs(
    launch: Callable[..., Any], logs: str | None, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> Any:
    """What a launcher does. `logs`: where it submits jobs, the folder of their logs; None where it runs them here."""
    from drafters.door import door
    from drafters.launcher import check_jobs, submitting

    with door():
        check_jobs(job_overrides)
        if logs is None:
            return launch(job_overrides, initial_job_idx)
        with submitting(f"{logs}/.submitit"):
            return launch(job_overrides, initial_job_idx)


def _check_arguments() -> None:
    """Raises ConfigError for options, such as --config-dir, that Hydra does not know or cannot take together."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        if message.startswith("unrecognized arguments:") and "=" in message:
            raise ConfigError(f"{message}: options such as -m and --config-dir stand before all settings")
        raise ConfigError(f"{message}; see --hydra-help for what is accepted; settings are written key=value")

    setattr(parser, "error", refuse)  # noqa: B010
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
        reason = re.sub(r"Error parsing override '.*?'(?= |$)|LexerNoViableAltException: .*", "", _line(error)).strip()
        return f"{error.override}: cannot be read{f': {reason}' if reason else ''}; {SYNTAX}"
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
        where = "outputs=, hydra.run.dir= or hydra.sweep.dir="
        return f"{error.filename!s}: {error.strerror}; choose another folder ({where})"
    if isinstance(error, UnicodeDecodeError):
        return f"a YAML file is not UTF-8 text: {_line(error)}; mend those that --config-dir or conf/ has"
    said = _line(error)
    if said.startswith("Config group override must be"):
        said = f"{_odd_choice() or 'a group'} is no choice: it takes the name of a file, see --info defaults-tree"
    return said.removeprefix("error: ") if said.startswith("error: ") else f"{said}; {SYNTAX}"


def _odd_choice() -> str | None:
    """The first word of the command that gives a group what is no name."""
    for word in sys.argv[1:]:
        group, _, value = word.lstrip("+~").partition("=")
        if (CONF / group).is_dir() and (not group or re.match(r"(null|true|false)$|[\d.+-]|$", value, re.IGNORECASE)):
            return f"{word}:"
    return None


def _missing(error: MissingConfigException) -> str:
    """Of a group or an option that is not there."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    where = re.match(r"In '([^']+)'", str(error))
    of = f" (from {where[1]})" if where and "/" in where[1] else ""
    if error.missing_cfg_file is None:
        return f"--config-path: {_line(error)}; leave it out, or use --config-dir, which adds a folder"
    if not group:
        return f"--config-name: got '{option}', and there is no such file{of}; leave it out"
    more = "; pip install -c constraints.txt '.[slurm]' has more" if group == "hydra/launcher" else ""
    return f"{group}: got '{option}'{of}; {_choices(option, error.options or ())}{more}"


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
        if not names:
            return f"{key}: unknown setting; there are none below {key.rpartition('.')[0]}; +{key}= adds what is free"
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
