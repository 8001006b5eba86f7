# Door: examines machine, target, conversations and cache, and with run= the drafter of a run and why its accepted
# length may be low. Changes nothing. Exit code 1 where there is a problem.
#
#     python -m data.doctor
#     python -m data.doctor run=outputs/markov-smollm2 out=outputs/markov-smollm2/doctor

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from data.command import CONF, begin, check_settings

if TYPE_CHECKING:
    from data.doctor.case import Case


def doctor(cfg: DictConfig, overrides: Sequence[str] = ()) -> "Case":
    """Examine, print the findings, and write doctor.json where `out` is given. `overrides`: the words of the command.

    Raises ConfigError for a wrong setting, CheckpointError for a `run` that is none and an `out` that cannot be
    written; everything else that is wrong is a finding.
    """
    from rich.rule import Rule

    from data.doctor.case import read_case
    from data.doctor.text import shown_example
    from drafters.config import to_plain
    from drafters.door import say, screen

    case = read_case(to_plain(cfg), overrides)
    out = None if case.config.out is None else _made(Path(case.config.out).expanduser())
    examine(case)
    console = screen()
    if case.config.example and case.examples:
        title, text = shown_example(case, marks=not console.is_terminal)
        console.print(Rule(title), text, Rule(), soft_wrap=True)
    for part in case.findings.render():
        say(part)
    if out is not None:
        say(f"Written: {_written(case, out)}")
    return case


def examine(case: "Case") -> None:
    """Room after room; what one could not make, the next ones do without."""
    from data.doctor import answers, causes, drafter, frozen, machine, states, text

    machine.check(case)
    if text.check(case):
        states.check(case)
    if case.outline is not None:
        frozen.check(case)
        states.check_head_fits(case)
    if case.run is not None:
        drafter.check(case)
    answers.check(case)
    if case.run is not None:
        causes.check(case)


def _made(out: Path) -> Path:
    """The folder for results, made before anything is examined."""
    from drafters.checkpoint import write_error

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(out, error) from error
    return out


def _written(case: "Case", out: Path) -> Path:
    import json

    from drafters.checkpoint import write_whole

    facts = {
        "target": None if case.outline is None else case.outline.spec.name,
        "run": None if case.run is None else str(case.run.folder),
    }
    text = json.dumps({**case.findings.to_dict(), **facts}, indent=1, allow_nan=False) + "\n"
    return write_whole(out / "doctor.json", lambda temp: temp.write_text(text))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="doctor")
def main(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from drafters.door import door

    with door():
        check_settings(cfg, "doctor")
        if doctor(cfg, HydraConfig.get().overrides.task).findings.has_problem:
            raise SystemExit(1)


if __name__ == "__main__":
    begin(main)
