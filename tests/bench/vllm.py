# Accepted lengths in vLLM beside our own evaluator's:
#     python -m tests.bench.vllm RUN --prompts A.jsonl B.jsonl --each 16 --out FOLDER [--to hf] [--quants none int8]
# DRAFTERS_VLLM names the python of vLLM's environment (docs/export.md). Prompts go to it as token ids, so templates
# cannot differ. Each measurement is a file in FOLDER and is not done again.

import argparse
from functools import partial

from export import to_hf, to_speculators
from export.families import family_of
from export.serving import METHODS
from tests.bench.engines import Run, arguments, done, own_rounds, show_lengths
from tests.engines.vllm import vllm


def main() -> None:
    parser = argparse.ArgumentParser()
    arguments(parser, each=16)
    parser.add_argument("--to", choices=["hf", "speculators"], default="hf")
    parser.add_argument("--quants", nargs="+", default=["none"])
    parser.add_argument("--dtype", default="bfloat16", help="of the target, here and there")
    args = parser.parse_args()
    run = Run.of(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    rounds = partial(own_rounds, run, args.prompts, each=args.each, tokens=args.tokens, dtype=args.dtype)
    ours = done(args.out / f"ours-{args.dtype}.json", rounds)
    length = run.source.node["block_size"]
    for quant in args.quants:
        name = f"{args.to}-{quant}-{args.dtype}"
        found = done(args.out / f"{name}.json", partial(serve, args, run.source, name, quant, ours))
        drafted, accepted = (sum(row[key] for row in found) for key in ("drafted", "accepted"))
        print(f"{name}: its own count: {drafted} drafted, {accepted} accepted", flush=True)
        show_lengths([(row["accepted"] + row["rounds"], row["rounds"]) for row in found], ours, length)
        same = sum(a["tokens"] == b["tokens"] for a, b in zip(found, ours, strict=True))
        print(f"  the same text on {same} of {len(ours)} prompts", flush=True)


def serve(args, source, name, quant, ours) -> list[dict]:
    """vLLM's answers to the same prompts."""
    made, out = {"hf": to_hf, "speculators": to_speculators}[args.to], args.out / f"draft-{name}"
    if not out.exists():
        out.mkdir()
        verifier = {"verifier": str(source.target_folder)} if args.to == "speculators" else {}
        made.write(source, quant, out, options=made.Options(**verifier))
    return vllm(
        args.out,
        "serve",
        target=str(source.target_folder),
        draft=str(out),
        method=METHODS[family_of(source.node)],
        dtype=args.dtype,
        length=source.node["block_size"],
        tokens=args.tokens,
        context=2048,
        ignore_stops=False,
        stops=list(source.spec.eos_ids),
        prompts=[row["prompt"] for row in ours],
    )


if __name__ == "__main__":
    main()
