# The simulator against the real batched loop: tokens per second of all rows, by batch size and schedule, from rounds in
# which the batch was full (in the simulator, a closed loop).
#
#     python -m tests.bench.simulated --run outputs/markov-smollm2 --prompts a.jsonl b.jsonl --batch 1 4 16
#
# The run needs task=calibrate and task=profile before. Schedules take turns on every batch size, round by round.

import argparse
from pathlib import Path
from statistics import median

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.contestants import find_entries, target_node
from drafters.decoding.loop import DecodeConfig, RunTimings, decode
from drafters.door import load_target
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.gate import Gated
from drafters.scheduling.observations import Observations
from drafters.scheduling.policy import Policy, find_costs
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Prefix
from drafters.scheduling.simulate import Replay, SimulateConfig, simulate

SCHEDULERS = {
    "off": Off(),
    "fixed": Fixed(),
    "prefix": Prefix(),
    "asynchronous": Asynchronous(),
    "gated": Gated(inner=Asynchronous()),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=16, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--observations", type=Path, required=True, help="of task=calibrate, on prompts like these")
    args = parser.parse_args()
    entries = find_entries([args.run], {}, key="run")
    target = load_target(target_node(entries, None), device="cpu")
    drafter, folder = entries[0].load(target).drafter, entries[0].run.drafter
    costs, calibration = find_costs(None, folder), Calibration.load(folder)
    replay = Replay(Observations.load(args.observations), calibration)
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=args.each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
    prompts = [dialogue.encode(()) for dialogue in dialogues]
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(args.rounds):
        for batch in args.batch:
            for name, scheduler in SCHEDULERS.items():
                policy = Policy(scheduler=scheduler, costs=costs, calibration=calibration)
                # As many batches for each: few rows at a time take long.
                few = prompts[:: max(1, len(prompts) // (4 * batch))]
                config = DecodeConfig(max_new_tokens=args.tokens, batch_size=batch, policy=policy)
                timings = RunTimings()
                rates: list[tuple[int, float]] = []
                rows = decode(target, drafter, few, config, timings=timings)
                gained = _gained_by_round(rows, timings)
                for cost, tokens in zip(timings.rounds, gained, strict=True):
                    if cost.rows == batch:
                        rates.append((tokens, cost.seconds))
                tokens, seconds = (sum(values) for values in zip(*rates, strict=True))
                found.setdefault((batch, name), []).append(tokens / seconds)
    settings = SimulateConfig(num_seeds=2)
    print(f"{'batch':>5s} {'schedule':14s} {'measured':>9s} {'simulated':>10s} {'error':>7s}")
    for (batch, name), values in found.items():
        told = simulate(replay, costs, SCHEDULERS[name], concurrency=batch, config=settings).tokens_per_second.value
        print(f"{batch:5d} {name:14s} {median(values):9.1f} {told:10.1f} {told / median(values) - 1:+7.1%}")


def _gained_by_round(rows, timings) -> list[int]:
    """Tokens that all rows gained in each round of a decoding: rows join in order and live without gaps."""
    gained = [0] * len(timings.rounds)
    waiting = sorted(rows, key=lambda row: row.prompt)
    live: list[list[int]] = []
    batch = max(cost.rows for cost in timings.rounds)
    for number in range(len(gained)):
        while waiting and len(live) < batch:
            tokens = [r.gained for r in waiting.pop(0).rounds]
            if tokens:
                live.append(tokens)
        gained[number] = sum(tokens.pop(0) for tokens in live)
        live = [tokens for tokens in live if tokens]
    return gained


if __name__ == "__main__":
    main()
