# The way out: `python -m export run=outputs/NAME to=hf quant=int8` writes a folder that an engine loads, checks it by
# reading it back and decoding with it, and says what it costs. `import_draft` is the way in.

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from data.command import begin, check_settings

if TYPE_CHECKING:
    from drafters.contestants import Entry
    from export.exporting import Measure

CONF = str(Path(__file__).resolve().parents[1] / "conf")
PROMPTS = ("split", "num_prompts", "turns")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings of this door beside those of the format, the source, the target and the prompts."""

    run: str | None = None
    quant: str = "none"
    out: str | None = None
    overwrite: bool = False
    push: str | None = None
    private: bool = False
    license: str | None = None
    check: bool = True
    max_new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError("run: got null; accepted: the folder of a run, such as outputs/markov-smollm2")
        if self.quant not in ("none", "int8", "int4", "fp8"):
            raise ValueError(f"quant: got '{self.quant}'; accepted: none, int8, int4, fp8")
        if self.out == "":
            raise ValueError("out: got ''; accepted: a folder, or null")


def export(cfg: DictConfig) -> None:
    """Do what `cfg` says; everything that can be refused is refused before the target is loaded."""
    from drafters.config import build_config, to_plain, typed
    from drafters.contestants import find_entries, target_node
    from drafters.decoding.render import tables
    from drafters.door import say
    from drafters.stopping import keeping
    from drafters.weights import hub_id, resolve
    from export.exporting import Plan, export_drafter, push_folder
    from export.formats import format_of
    from export.source import open_source

    plain = to_plain(cfg)
    choice = typed(Choice, {f.name: plain[f.name] for f in fields(Choice)}, key="")
    _, options = build_config(plain["to"], key="to")
    to = plain["to"]["_target_"].split(".")[1].removeprefix("to_")
    (entry,) = find_entries([str(choice.run)], {}, key="run")
    assert entry.run is not None
    node = target_node([entry], plain.get("target"))
    if to == "speculators" and options.verifier is None:
        options = replace(options, verifier=hub_id(node["weights"]))
    target_folder = resolve(node["weights"], sha256=node.get("sha256"))
    source = open_source(entry.run.drafter, target_folder=target_folder, other_target=plain.get("target") is not None)
    name = to if choice.quant == "none" else f"{to}-{choice.quant}"
    out = entry.run.folder / "export" / name if choice.out is None else Path(choice.out).expanduser()
    if out.is_symlink() or out.name in ("", ".."):
        out = out.resolve()
    plan = Plan(
        to=to,
        quant=choice.quant,
        options=options,
        out=out,
        base_model=node["weights"],
        license=choice.license,
        overwrite=choice.overwrite,
    )
    measure = measure_of(cfg, choice, entry) if choice.check else None
    with keeping(f"nothing of {out} was changed; the same command begins anew"):
        exported = export_drafter(source, plan, measure)
    say(tables(exported.sections, width=100) if exported.sections else f"{exported.num_tensors} tensors, read back")
    say(f"Written: {out}")
    for note in format_of(to).notes(source, options=options):
        say(f"note: {note}")
    if choice.push is not None:
        say(f"Pushed: {push_folder(out, choice.push, private=choice.private)}")


def measure_of(cfg: DictConfig, choice: Choice, entry: "Entry") -> "Measure":
    """Decodes the prompts that `cfg` names with the run's own target, once it is called."""
    from data.prompts import PromptConfig
    from drafters.config import build_config, to_plain, typed
    from drafters.contestants import target_node
    from drafters.decoding.loop import DecodeConfig
    from drafters.decoding.runner import Execution
    from drafters.door import load_target
    from drafters.progress import phase_bars
    from evaluate import encoder_of, find_dialogues
    from export.kept import measure_kept

    plain = to_plain(cfg)
    wanted = typed(PromptConfig, {name: plain[name] for name in PROMPTS}, key="")
    _, source = build_config(cfg.source, key="source")

    def measure(before: Any, after: Any) -> Any:
        target = load_target(target_node([entry], None), device=choice.device)
        encoder = encoder_of([entry], target, thinking=None)
        room = target.spec.max_position - choice.max_new_tokens
        dialogues, _ = find_dialogues(source, encoder, wanted, [entry], room=room)
        config = DecodeConfig(max_new_tokens=choice.max_new_tokens, batch_size=choice.batch_size, seed=choice.seed)
        before, after = (one.to(target.device).eval() for one in (before, after))
        with phase_bars(True) as progress:
            execution = replace(Execution(), progress=progress)
            return measure_kept(target, before, after, dialogues, config, execution)

    return measure


@hydra.main(version_base="1.3", config_path=CONF, config_name="export")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        check_settings(cfg, "export")
        export(cfg)


if __name__ == "__main__":
    begin(main)
