# The drafter of a run against the target that it shall draft for: hashes, template, vocabulary, layers, positions,
# windows, number formats, and the run's own files.

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.doctor.frozen import ANGLE, angle_error, quantization_of

if TYPE_CHECKING:
    from torch import Tensor

    from data.doctor.case import Case
    from data.doctor.findings import Findings
    from drafters.spec import TargetSpec

__all__ = ["check", "check_rope", "check_target", "check_vocab", "check_weights"]

COVERAGE = 0.95  # of supervised tokens: one in twenty that cannot be drafted ends a draft of seven in 30 % of cases


def check(case: "Case") -> None:
    """Everything about the run but its accepted length."""
    from drafters.checkpoint import load_drafter, read_config
    from drafters.spec import TargetSpec

    findings, run = case.findings, case.run
    assert run is not None
    with findings.watched("run/config"):
        config, copies = read_config(run.drafter), True
        stored = TargetSpec.from_dict(config["target"])
        kind = config["drafter"].get("_target_", "?")
        findings.ok("run/config", f"{kind} '{config['drafter'].get('name')}', step {config['provenance'].get('step')}")
        with findings.watched("run/weights"):
            drafter = load_drafter(run.drafter)
            check_weights(findings, drafter.state_dict())
            copies = any(name.endswith("inv_freq") for name, _ in drafter.named_buffers())
            spec = None if case.outline is None else case.outline.spec
            check_vocab(case, drafter, spec or stored)
            check_layers(case, drafter, spec or stored)
            check_window(case, config["drafter"])
        if case.outline is not None:
            check_target(case, stored)
            if copies:
                check_rope(findings, stored, case.outline.spec)
            else:
                findings.ok("run/rope", "the drafter has no positions of its own")
        if case.splits:
            check_data(case, config["provenance"])
        check_report(findings, run, config)


def check_weights(findings: "Findings", tensors: "Mapping[str, Tensor]") -> None:
    """Number formats, and numbers that are none. Their checksum was right, or they would not have been loaded."""
    floats = {name: one for name, one in tensors.items() if one.is_floating_point()}
    bad = {name: int((~one.isfinite()).sum()) for name, one in floats.items()}
    bad = {name: count for name, count in bad.items() if count}
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in floats.values()}))
    size = sum(one.numel() for one in floats.values())
    if bad:
        names = ", ".join(f"{name} ({count})" for name, count in list(bad.items())[:3])
        findings.problem(
            "run/weights",
            f"{sum(bad.values()):,} numbers in {len(bad)} tensors are not finite: {names}",
            "train again from an earlier checkpoint, with a smaller optim.lr",
            is_cause=True,
        )
    else:
        findings.ok("run/weights", f"checksum right; {len(floats)} tensors, {size:,} numbers ({dtypes}), all finite")


def check_target(case: "Case", stored: "TargetSpec") -> None:
    """Whether this is the target that the drafter was trained for: sizes, weights, template, dtype."""
    from drafters.checkpoint import SIZES

    assert case.outline is not None
    findings, spec = case.findings, case.outline.spec
    for name in SIZES:
        mine, given = getattr(stored, name), getattr(spec, name)
        # An outline has no weights to measure its scales on.
        if not name.endswith("scale") and mine != given:
            found = f"trained for a target with {name} {mine}, this one has {given}"
            findings.problem("run/target", found, "target= the one that it was trained for", is_cause=True)
            return
    kind = None if case.target is None else quantization_of(case.target)
    if stored.weights_hash != spec.weights_hash:
        findings.problem(
            "run/target",
            f"trained for weights {stored.weights_hash[:12]}, this target has {spec.weights_hash[:12]}"
            + (f", quantized by {kind}" if kind else ""),
            "target= the one that it was trained for, or train for this one (warm_start= this run is quick)",
            is_cause=True,
        )
    else:
        findings.ok("run/target", f"trained for these weights ({spec.weights_hash[:12]})")
    template = case.encoder.template_hash if case.encoder is not None else spec.template_hash
    if stored.template_hash != spec.template_hash:
        findings.warning(
            "run/template",
            f"trained with chat template {stored.template_hash[:12]}, this target has {spec.template_hash[:12]}",
            "serve with the template of the training, or train with this one",
            is_cause=True,
        )
    else:
        own = "" if template == spec.template_hash else f", with data.template_kwargs {dict(case.data.template_kwargs)}"
        findings.ok("run/template", f"trained with this chat template ({spec.template_hash[:12]}){own}")
    if stored.dtype != spec.dtype:
        advice = f"target.dtype={stored.dtype}, unless it is served in {spec.dtype}"
        findings.warning(
            "run/dtype", f"trained on states in {stored.dtype}, this target computes in {spec.dtype}", advice
        )
    else:
        findings.ok("run/dtype", f"states in {spec.dtype}, in training as here")


def check_vocab(case: "Case", drafter: Any, spec: "TargetSpec") -> None:
    """Ids in range, the target's stop ids among them, and the share of the conversations' tokens that they cover."""
    from drafters.heads.draft_vocab import STORED
    from drafters.vocab import DraftVocab, coverage

    ids_V = drafter.state_dict().get(STORED)
    if ids_V is None:
        case.findings.ok("run/vocabulary", f"drafts from all {spec.vocab_size:,} tokens of the target")
        return
    outside = int((ids_V >= spec.vocab_size).sum())
    if outside:
        found = f"{outside:,} of {len(ids_V):,} draft ids are not among the target's {spec.vocab_size:,}"
        case.findings.problem("run/vocabulary", found, "target= the one that it was trained for", is_cause=True)
        return
    vocab = DraftVocab(ids_V, num_full=spec.vocab_size)
    absent = [one for one in spec.eos_ids if not vocab.t2d[one]]
    found = f"{vocab.size:,} of {spec.vocab_size:,} tokens"
    if absent:
        found = f"{found}; the stop tokens {absent} are not among them"
        case.findings.warning("run/vocabulary", found, "train with a draft vocabulary of this target")
    if not case.splits:
        case.findings.note("run/vocabulary", f"{found}; without conversations its coverage is not known")
        return
    split = "validation" if case.splits["validation"] else "train"
    held = coverage([one.tokens_T[one.loss_mask_T] for one in case.splits[split]], vocab)
    found = f"{found}; they are {held:.1%} of the supervised tokens ({split}; expected: {COVERAGE:.0%})"
    if held < COVERAGE:
        advice = "a larger drafter.draft_vocab_size, or one counted on such conversations"
        case.findings.warning("run/vocabulary", f"{found}: the others can never be drafted", advice, cost=1 - held)
    else:
        case.findings.ok("run/vocabulary", found)


def check_layers(case: "Case", drafter: Any, spec: "TargetSpec") -> None:
    """The target layers that it reads: there, and stored."""
    layers = list(drafter.needs.layer_ids)
    if wrong := [one for one in layers if not 0 <= one < spec.num_layers]:
        found = f"reads the layers {layers}, but the target has 0..{spec.num_layers - 1}: {wrong} are not there"
        case.findings.problem("run/layers", found, "target= the one that it was trained for", is_cause=True)
        return
    found = f"reads the layers {layers} of 0..{spec.num_layers - 1}" if layers else "reads no aux hidden states"
    if case.states is not None:
        with case.findings.watched("run/layers"):
            case.states.manifest.check_needs(drafter.needs, case.states.folder)
            case.findings.ok("run/layers", f"{found}; the cache stores what it needs")
    else:
        case.findings.ok("run/layers", found)


def check_window(case: "Case", node: Mapping[str, Any]) -> None:
    """How far the drafter looks back, beside the target and the conversations."""
    if case.outline is None or "window" not in node:
        return
    own = node["window"]
    sliding = getattr(case.outline.model.config.get_text_config(), "sliding_window", None)
    lengths = sorted(len(one.tokens_T) for one in case.examples)
    middle = f"; half of the conversations have more than {lengths[len(lengths) // 2]:,} tokens" if lengths else ""
    case.findings.note(
        "run/window",
        f"the drafter sees {'all' if own is None else f'the last {own:,}'} positions, the target "
        f"{'all' if sliding is None else f'in some layers the last {sliding:,}'}{middle}",
        "export keeps the window; an engine that drops it drafts worse beyond it",
    )


def check_rope(findings: "Findings", stored: "TargetSpec", spec: "TargetSpec") -> None:
    """The frequencies that the drafter was trained with against the target's."""
    error = angle_error(stored.rope_inv_freq, spec.rope_inv_freq, spec.max_position)
    found = (
        f"trained with theta {stored.rope_theta:g}, scaling {stored.rope_scaling or 'none'}; this target: "
        f"{spec.rope_theta:g}, {spec.rope_scaling or 'none'}; at position {spec.max_position:,} they differ by "
        f"{error:.1e} radians (allowed {ANGLE:g})"
    )
    if error <= ANGLE:
        findings.ok("run/rope", found)
    else:
        advice = "the target's config was changed, or the drafter's: use the ones of the training"
        findings.problem("run/rope", found, advice, is_cause=True)


def check_data(case: "Case", provenance: Mapping[str, Any]) -> None:
    """Whether the conversations are still those of the training."""
    from drafters.cache import data_hash

    known, now = provenance.get("data_hash"), data_hash(case.examples)
    if known is None:
        case.findings.note("run/data", "the drafter does not say which conversations it was trained on")
    elif known == now:
        case.findings.ok("run/data", f"trained on these conversations, template and lengths ({now[:12]})")
    else:
        case.findings.note(
            "run/data",
            f"trained on other tokens ({known[:12]}) than the source gives here ({now[:12]})",
            "expected with another source=, template or data.max_length; else the files changed since",
        )


def check_report(findings: "Findings", run: Any, config: Mapping[str, Any]) -> None:
    """Whether the run was measured, and the report is of these weights."""
    path: Path = run.report
    if not path.is_file():
        found = "no report.json: the run was not measured, or not finished"
        findings.warning(
            "run/report", found, f"the train.py command of the run, or python evaluate.py run={run.folder}"
        )
        return
    try:
        provenance = json.loads(path.read_text()).get("provenance", {})
        measured = provenance.get("drafter", {}).get("sha256")
    except (OSError, ValueError, AttributeError) as error:
        findings.problem("run/report", f"{path} is damaged: {error}", f"python evaluate.py run={run.folder}")
        return
    if measured != config["weights"]["sha256"]:
        found = f"report.json is of other weights ({str(measured)[:12]}) than the drafter's"
        findings.warning("run/report", found, f"python evaluate.py run={run.folder} measures these")
    else:
        findings.ok("run/report", "report.json is of these weights")
