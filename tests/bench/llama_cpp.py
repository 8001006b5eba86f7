# Accepted lengths in llama.cpp beside our own evaluator's, and its speed with and without a draft:
#
#     python -m tests.bench.llama_cpp RUN --prompts A.jsonl B.jsonl --each 24 --out FOLDER --types F32 F16 --lengths 5 0
#
# DRAFTERS_LLAMA_CPP names llama.cpp (tests/engines/llama_cpp.py). Prompts go to it as token ids, so templates cannot
# differ. Each measurement is a file in FOLDER and is not done again; a length of 0 is the target alone.

import argparse
import json
import time
from functools import partial
from pathlib import Path

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.checkpoint import load_drafter
from drafters.contestants import find_entries, target_node
from drafters.decoding import metrics
from drafters.decoding.loop import DecodeConfig, decode
from drafters.door import load_target
from drafters.weights import resolve
from export import to_gguf
from export.gguf_layout import kind_of
from export.source import open_source
from tests.engines.llama_cpp import draft_options, serving, write_target

# What a server is asked to compute with where it shall be compared to the last digit.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")


def main() -> None:
    args = arguments()
    (entry,) = find_entries([args.run], {}, key="run")
    node = target_node([entry], None)
    source = open_source(entry.run.drafter, target_folder=resolve(node["weights"], sha256=node.get("sha256")))
    args.out.mkdir(parents=True, exist_ok=True)
    ours = done(args.out / f"ours-{args.dtype}.json", partial(evaluate, args, source, {**node, "dtype": args.dtype}))
    target = Path(args.target) if args.target else args.out / f"target-{args.target_type}.gguf"
    if not target.exists():
        write_target(source.target_folder, target, source.spec, type_name=args.target_type)
    for length in args.lengths:
        for type_name in args.types if length else ["alone"]:
            name = f"{target.stem}-{type_name}-{length}{'-exact' if args.exact else ''}{args.tag}"
            found = done(args.out / f"{name}.json", partial(serve, args, source, target, name, type_name, length, ours))
            show(name, found, ours, length)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=24, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", nargs="+", default=["F16"], help="types of the draft")
    parser.add_argument("--lengths", nargs="+", type=int, default=[5])
    parser.add_argument("--target", help="a GGUF of the target; else one is written")
    parser.add_argument("--target-type", default="F16", help="type of the target that is written")
    parser.add_argument("--dtype", default="float32", help="of our own target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="float32 caches, plain attention")
    parser.add_argument("--tag", default="", help="end of the files' names, to measure again")
    return parser.parse_args()


def done(path, work):
    """What is in the file, after it was made where it was missing."""
    if not path.exists():
        path.write_text(json.dumps(work()))
    return json.loads(path.read_text())


def evaluate(args, source, node) -> list[dict]:
    """Our own rounds on the prompts."""
    target = load_target(node, device="cpu")
    drafter = load_drafter(source.folder, spec=target.spec, allow_other_target=True)
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=args.each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
    prompts = [dialogue.encode(()) for dialogue in dialogues]
    rows = decode(target, drafter, prompts, DecodeConfig(max_new_tokens=args.tokens, batch_size=12))
    return [
        {
            "source": dialogue.source,
            "prompt": prompt.tolist(),
            "tokens": row.tokens,
            "rounds": [(r.accepted, r.proposed, r.full) for r in row.rounds],
        }
        for dialogue, prompt, row in zip(dialogues, prompts, rows, strict=True)
    ]


def serve(args, source, target, name, type_name, length, ours) -> list[dict]:
    """The server's answers to the same prompts."""
    options = []
    if length:
        folder = args.out / f"draft-{type_name}"
        if not folder.exists():
            folder.mkdir()
            to_gguf.write(source, "none", folder, options=to_gguf.Options(type=type_name))
        (draft,) = folder.glob("*.gguf")
        options = draft_options(draft, kind_of(source.node), length=length, threads=args.threads)
    if args.exact:
        options += EXACT
    answers = []
    with serving(target, args.out / f"{name}.log", *options, threads=args.threads) as server:
        server.ask(ours[0]["prompt"], num_tokens=8)  # warms up
        started = time.perf_counter()
        for row in ours:
            answer = server.ask(row["prompt"], num_tokens=args.tokens)
            answers.append({"tokens": answer.tokens, "rounds": answer.rounds, "timings": answer.timings})
        print(f"{name}: {time.perf_counter() - started:.0f} s for {len(ours)} prompts", flush=True)
    return answers


def show(name, found, ours, length) -> None:
    """Lengths on both sides with the interval of their ratio by prompt, the server's own count, and its speed."""
    tokens, ms = (sum(row["timings"][key] for row in found) for key in ("predicted_n", "predicted_ms"))
    line = f"{name}: {1000 * tokens / ms:.1f} tokens/s"
    if not length:
        print(line, flush=True)
        return
    made, stood = (sum(row["timings"][key] for row in found) for key in ("draft_n", "draft_n_accepted"))
    steps = sum(len(row["rounds"]) for row in found)
    print(f"{line}; its own count: {made} drafted, {stood} accepted, {1 + stood / steps:.3f} tokens a pass", flush=True)
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(found, ours, strict=True))
    for source in [*dict.fromkeys(row["source"] for row in ours), "all"]:
        pairs = [(a, b) for a, b in zip(found, ours, strict=True) if source in (b["source"], "all")]
        sums = [(*engine_sums(a, length), *own_sums(b, length)) for a, b in pairs]
        totals = [sum(column) for column in zip(*sums, strict=True)]
        low, high = metrics.bootstrap_ci(sums, metrics.ratio_of_rates, seed=0)
        theirs, mine = totals[0] / totals[1], totals[2] / totals[3]
        print(
            f"  {source:10s} {theirs:.3f} against {mine:.3f}: {theirs / mine:.3f} [{low:.3f}, {high:.3f}]", flush=True
        )
    print(f"  the same text on {same} of {len(ours)} prompts", flush=True)


def engine_sums(row, length) -> tuple[int, int]:
    """Tokens and rounds of those that drafted in full and that no stop token cut."""
    rounds = row["rounds"]
    gained = 1 + sum(stood + 1 for stood, _ in rounds)
    if gained > len(row["tokens"]):
        rounds = rounds[:-1]
    full = [stood for stood, made in rounds if made == length]
    return sum(full) + len(full), len(full)


def own_sums(row, length) -> tuple[int, int]:
    """The same of ours, had every draft been cut to `length`."""
    full = [min(accepted, length) for accepted, _, is_full in row["rounds"] if is_full]
    return sum(full) + len(full), len(full)


if __name__ == "__main__":
    main()
