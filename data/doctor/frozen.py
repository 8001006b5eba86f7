# The target itself: its self-check, and whether its rotary frequencies and number format are what drafters copy.

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.doctor.case import Case
    from data.doctor.findings import Findings

__all__ = ["angle_error", "check", "check_rope", "quantization_of"]

ANGLE = 0.01  # radians at the last position: what a float32 table is off by itself is below it


def check(case: "Case") -> None:
    """Load it, which ends with its self-check, if its weights fit."""
    from data.doctor.machine import check_memory
    from drafters.door import load_target

    findings, outline = case.findings, case.outline
    assert outline is not None
    with findings.watched("machine/memory"):
        fits = check_memory(case)
        if not case.config.load_target or not fits:
            reason = "its weights do not fit" if case.config.load_target else "load_target=false"
            findings.note("target/self-check", f"not looked at: {reason}")
            return
        with findings.watched("target/self-check"):
            begun = time.perf_counter()
            case.target = load_target(case.node, device=case.config.device)
            findings.ok(
                "target/self-check",
                "passed: captured layers, last state, logits, embeddings, a padded batch, cached decoding with a "
                f"rollback ({time.perf_counter() - begun:.0f} s with loading)",
            )
    if not case.has_target:
        return
    check_rope(findings, case.target)
    kind = quantization_of(case.target)
    if kind is not None:
        findings.note(
            "target/quantized",
            f"its weights are quantized ({kind}); states, and so drafters, are those of the quantized model",
            "serve this very model: a drafter trained on it fits no other",
        )


def quantization_of(target: Any) -> str | None:
    """The method that a target's config names, None for plain weights."""
    found = getattr(target.model.config, "quantization_config", None)
    if found is None:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    return str(values.get("quant_method", "of an unknown method"))


def check_rope(findings: "Findings", target: Any) -> None:
    """The frequencies that draft layers copy against those that the target's own modules hold."""
    spec, frequencies = target.spec, []
    for name, buffer in target.model.named_buffers():
        if name.endswith("inv_freq") and buffer.shape == (len(spec.rope_inv_freq),):
            frequencies.append(tuple(buffer.double().tolist()))
    if not frequencies:
        findings.note("target/rope", f"its modules hold no {len(spec.rope_inv_freq)} frequencies to compare with")
        return
    error = min(angle_error(spec.rope_inv_freq, one, spec.max_position) for one in frequencies)
    found = (
        f"theta {spec.rope_theta:g}, scaling {spec.rope_scaling or 'none'}; at position {spec.max_position:,} draft "
        f"layers turn by {error:.1e} radians more or less than the target's own (allowed {ANGLE:g})"
    )
    if error <= ANGLE:
        findings.ok("target/rope", found)
    else:
        findings.note("target/rope", found, "draft layers learn their own positions; long texts may draft worse")


def angle_error(one: Any, other: Any, position: int) -> float:
    """The largest difference in radians between two sets of inverse frequencies at a position; infinite where their
    numbers differ."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) * position
