# Fails unless a report.json holds every promised key with a sane value: the CI's check of a real run.

import json
import math
import sys
from pathlib import Path
from typing import Any

KEYS = {
    "schema",
    "accepted_length",
    "accepted_length_ci95",
    "acceptance_by_position",
    "rounds",
    "tokens",
    "draft_length",
    "accepted_length_at_draft_length",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "draft_ms",
    "verify_ms",
    "baseline_step_ms",
    "predicted_speedup",
    "temperature",
    "batch_size",
    "by_source",
    "divergences",
    "provenance",
}
POSITIVE = ("rounds", "tokens", "tokens_per_second", "baseline_tokens_per_second", "speedup", "baseline_step_ms")


def problems(report: dict[str, Any]) -> list[str]:
    missing = sorted(KEYS - set(report))
    if missing:
        return [f"missing key: {key}" for key in missing]
    found = [f"{key} is {report[key]}, expected more than 0" for key in POSITIVE if not report[key] > 0]
    if report["schema"] != 1:
        found.append(f"schema is {report['schema']}, expected 1")
    if not 1 <= report["accepted_length"] < math.inf:
        found.append(f"accepted_length is {report['accepted_length']}, but the bonus token alone makes it 1")
    found += [
        f"acceptance {p} is no share" for p in report["acceptance_by_position"] if p is not None and not 0 <= p <= 1
    ]
    return found


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    found = problems(report)
    print(
        "\n".join(found) if found else f"{sys.argv[1]}: accepted length {report['accepted_length']:.2f}, all keys there"
    )
    sys.exit(bool(found))
