# Accepted lengths in llama.cpp beside our own evaluator's, and its speed with and without a draft:
#     python -m tests.bench.llama_cpp RUN --prompts A.jsonl B.jsonl --each 24 --out FOLDER --types F32 F16 --lengths 5 0
# DRAFTERS_LLAMA_CPP names llama.cpp (docs/export.md). Prompts go to it as token ids, so templates cannot differ. Each
# measurement is a file in FOLDER and is not done again; a length of 0 is the target alone.

import argparse
import time
from functools import partial

from export import to_gguf
from export.gguf_layout import kind_of
from tests.bench.engines import Run, arguments, done, own_rounds, show_lengths
from tests.engines.llama_cpp import draft_options, serving, write_target

# What a server is asked to compute with where it shall be compared to the last digit.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")


def main() -> None:
    args = parsed()
    run = Run.of(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    rounds = partial(own_rounds, run, args.prompts, each=args.each, tokens=args.tokens, dtype=args.dtype)
    ours = done(args.out / f"ours-{args.dtype}.json", rounds)
    target = args.out / f"target-{args.target_type}.gguf"
    if not target.exists():
        write_target(run.source.target_folder, target, run.source.spec, type_name=args.target_type)
    for length in args.lengths:
        for type_name in args.types if length else ["alone"]:
            name = f"{target.stem}-{type_name}-{length}{'-exact' if args.exact else ''}{args.tag}"
            log, options = args.out / f"{name}.log", options_of(args, run.source, type_name, length)
            found = done(args.out / f"{name}.json", partial(serve, args, target, log, options, ours))
            show(name, found, ours, length)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments(parser, each=24)
    parser.add_argument("--types", nargs="+", default=["F16"], help="types of the draft")
    parser.add_argument("--lengths", nargs="+", type=int, default=[5])
    parser.add_argument("--target-type", default="F16", help="type of the target")
    parser.add_argument("--dtype", default="float32", help="of our own target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="float32 caches, plain attention")
    parser.add_argument("--tag", default="", help="end of the files' names, to measure again")
    return parser.parse_args()


def options_of(args, source, type_name, length) -> list[str]:
    """Of the server, with a draft of that type where it drafts at all."""
    options = []
    if length:
        folder = args.out / f"draft-{type_name}"
        if not folder.exists():
            folder.mkdir()
            to_gguf.write(source, "none", folder, options=to_gguf.Options(type=type_name))
        (draft,) = folder.glob("*.gguf")
        options = draft_options(draft, kind_of(source.node), length=length, threads=args.threads)
    return [*options, *(EXACT if args.exact else ())]


def serve(args, target, log, options, ours) -> list[dict]:
    """The server's answers to the same prompts."""
    answers = []
    with serving(target, log, *options, threads=args.threads) as server:
        server.ask(ours[0]["prompt"], num_tokens=8)  # warms up
        started = time.perf_counter()
        for row in ours:
            answer = server.ask(row["prompt"], num_tokens=args.tokens)
            answers.append({"tokens": answer.tokens, "rounds": answer.rounds, "timings": answer.timings})
        print(f"{log.stem}: {time.perf_counter() - started:.0f} s for {len(ours)} prompts", flush=True)
    return answers


def show(name, found, ours, length) -> None:
    """Lengths on both sides, the server's own count, and its speed."""
    tokens, ms = (sum(row["timings"][key] for row in found) for key in ("predicted_n", "predicted_ms"))
    line = f"{name}: {1000 * tokens / ms:.1f} tokens/s"
    if not length:
        print(line, flush=True)
        return
    made, stood = (sum(row["timings"][key] for row in found) for key in ("draft_n", "draft_n_accepted"))
    steps = sum(len(row["rounds"]) for row in found)
    print(f"{line}; its own count: {made} drafted, {stood} accepted, {1 + stood / steps:.3f} tokens a pass", flush=True)
    show_lengths([full_sums(row, length) for row in found], ours, length)
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(found, ours, strict=True))
    print(f"  the same text on {same} of {len(ours)} prompts", flush=True)


def full_sums(row, length) -> tuple[int, int]:
    """Tokens and rounds of those that drafted in full and that no stop token cut."""
    rounds = row["rounds"]
    gained = 1 + sum(stood + 1 for stood, _ in rounds)
    if gained > len(row["tokens"]):
        rounds = rounds[:-1]
    full = [stood for stood, made in rounds if made == length]
    return sum(full) + len(full), len(full)


if __name__ == "__main__":
    main()
