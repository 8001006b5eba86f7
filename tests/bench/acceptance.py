# Accepted lengths of several drafters on the same prompts, without the speed runs that make a full comparison long:
#
#     python -m tests.bench.acceptance outputs/*-smollm2 ngram --prompts a.jsonl b.jsonl --each 80 --journal FOLDER
#
# Prints accepted length by source, acceptance by position, and the paired lead of each over the last one named, with
# 95 % intervals by prompt. What is in the journal is not decoded again.

import argparse
import math
from pathlib import Path

from hydra import compose, initialize_config_dir

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.config import to_plain
from drafters.contestants import find_entries, target_node
from drafters.decoding import metrics
from drafters.decoding.journal import Journal
from drafters.decoding.loop import DecodeConfig
from drafters.decoding.runner import Execution, Runner
from drafters.door import load_target
from tests.door_world import ROOT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=16, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--journal", type=Path, required=True)
    args = parser.parse_args()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        baselines = to_plain(compose("evaluate"))["baselines"]
    drafters, prompts = decoded(args, baselines)
    sources = sorted({source for source, _ in next(iter(prompts.values())).values()})
    for name, rows in prompts.items():
        print(f"\n{name}")
        for source in [*sources, "all"]:
            rounds = [one for of, one in rows.values() if source in (of, "all")]
            length = metrics.accepted_length(r for one in rounds for r in one)
            low, high = metrics.accepted_length_ci(rounds, seed=0)
            print(
                f"  {source:20s} {length:.3f} [{low:.2f}, {high:.2f}]  {len(rounds)} prompts",
                _lead(prompts, name, source),
            )
        rounds = [one for _, one in rows.values()]
        size = drafters[name].block_size
        rates = metrics.conditional_acceptance([r for one in rounds for r in one], size)
        bounds = metrics.conditional_acceptance_ci(rounds, size, seed=0)
        print(
            "  "
            + "  ".join(
                f"@{k + 1} {a:.3f} [{low:.2f}, {high:.2f}]"
                for k, (a, (low, high)) in enumerate(zip(rates, bounds, strict=True))
            )
        )


def decoded(args, baselines):
    """Drafters by name, and what each decodes: (source, rounds) by the number of a prompt. `args` has names, prompts,
    each, tokens, batch and journal."""
    entries = find_entries(args.names, baselines, key="names")
    target = load_target(target_node(entries, None), device="cpu")
    drafters = {entry.name: entry.load(target).drafter for entry in entries}
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=args.each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
    config = DecodeConfig(max_new_tokens=args.tokens, batch_size=args.batch)
    with Journal(args.journal, f"{args.names} {args.prompts} {args.each} {args.tokens}", resume=True) as journal:
        runner = Runner(target, drafters, config, Execution(journal=journal))
        found = runner.turns("acceptance", dialogues, list(drafters), {})
    return drafters, {
        name: {
            item.number: (item.source, row.rounds)
            for run in runs
            for item, row in zip(run.unit.items, run.rows, strict=True)
        }
        for name, runs in found.items()
    }


def _lead(prompts, name, source) -> str:
    """The paired interval of this drafter's lead over the last one named, on this source."""
    last = list(prompts)[-1]
    if name == last:
        return ""
    sums = [
        [
            tokens_and_rounds(prompts[one][number][1])
            for number, (of, _) in prompts[name].items()
            if source in (of, "all")
        ]
        for one in (name, last)
    ]
    low, high = metrics.paired_difference_ci(*sums, seed=0)
    return "" if math.isnan(low) else f"over {last}: {low:+.3f} to {high:+.3f}"


def tokens_and_rounds(rounds) -> tuple[int, int]:
    full = metrics.full_rounds(rounds)
    return sum(r.accepted + 1 for r in full), len(full)


if __name__ == "__main__":
    main()
