# What a batch gains, and what the loop itself costs, on a trained drafter and real prompts, interleaved:
#
#     python -m tests.bench.batched --run outputs/markov-smollm2 --prompts a.jsonl b.jsonl [--batch 8] [--rounds 3]
#
# Prints tokens per second with prefill and without for batch 1 and for the batch, drafted and plain, the ratios, and
# the share of a round that is neither target nor drafter. The bars: 2.5 times, below 10 % at batch 1.

import argparse
import time
from statistics import median

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.contestants import find_entries, target_node
from drafters.decoding.loop import DecodeConfig, RunTimings, decode
from drafters.door import load_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=8, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    entries = find_entries([args.run], {}, key="run")
    target = load_target(target_node(entries, None), device="cpu")
    drafter = entries[0].load(target).drafter
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=args.each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
    prompts = [dialogue.encode(()) for dialogue in dialogues]
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for turn in range(args.rounds + 1):
        for batch_size in (1, args.batch):
            for name, one in (("drafted", drafter), ("plain", None)):
                timings = RunTimings()
                config = DecodeConfig(max_new_tokens=args.tokens if turn else 16, batch_size=batch_size)
                started = time.perf_counter()
                rows = decode(target, one, prompts, config, timings=timings)
                seconds = time.perf_counter() - started
                tokens = sum(len(row.tokens) for row in rows)
                if turn:  # the first turn warms up
                    values = tokens / seconds, (tokens - len(rows)) / timings.decode_s
                    found.setdefault((name, batch_size), []).append((*values, timings.overhead_s / timings.decode_s))
    print(f"{len(prompts)} prompts, {args.tokens} new tokens, medians of {args.rounds} rounds")
    for name in ("drafted", "plain"):
        alone, many = ([median(v) for v in zip(*found[name, b], strict=True)] for b in (1, args.batch))
        for batch_size, values in ((1, alone), (args.batch, many)):
            print(
                f"{name}, batch {batch_size}: {values[0]:.1f} tokens/s with prefill, {values[1]:.1f} without; "
                f"loop {values[2]:.1%} of a round"
            )
        print(f"{name}: batch {args.batch} / batch 1 = {many[0] / alone[0]:.2f} with, {many[1] / alone[1]:.2f} without")


if __name__ == "__main__":
    main()
