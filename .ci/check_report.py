# Fails unless a report.json can be read back (schema, types) and holds every promised key with a sane value: the CI's
# check of a real run.

import sys
from pathlib import Path
from typing import Any

from drafters.decoding.report import CONTRACT_KEYS, Report
from drafters.errors import DataError

POSITIVE = ("rounds", "tokens", "tokens_per_second", "baseline_tokens_per_second", "speedup", "baseline_step_ms")


def problems(report: dict[str, Any]) -> list[str]:
    """What is wrong with the values of a report.json, where null stands for what was not measured."""
    missing = sorted(CONTRACT_KEYS - set(report))
    if missing:
        return [f"missing key: {key}" for key in missing]
    found = [f"{key} is {report[key]}, expected more than 0" for key in POSITIVE if not (report[key] or 0) > 0]
    if not (report["accepted_length"] or 0) >= 1:
        found.append(f"accepted_length is {report['accepted_length']}, but the bonus token alone makes it 1")
    shares = report["acceptance_by_position"] or []
    found += [] if shares else ["acceptance_by_position holds nothing"]
    found += [f"acceptance {p} is no share" for p in shares if p is not None and not 0 <= p <= 1]
    return found


def main(path: Path) -> int:
    """0 for a good report, else 1, with the reasons on the screen."""
    try:
        report = Report.load(path)
    except DataError as error:
        print(error)
        return 1
    found = problems(report.to_dict())
    print("\n".join(found) if found else f"{path}: accepted length {report.accepted_length:.2f}, all keys there")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
