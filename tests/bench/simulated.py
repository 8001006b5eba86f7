# The simulator against the real batched loop: tokens per second by batch size and schedule. Loops are closed: where a
# row ends, the next prompt begins. Machines drift, so all goes on in laps, in which costs are timed and every loop
# decodes some rounds. FILE is the observations.safetensors of task=simulate on the same prompts (turns=1
# num_prompts=EACH); the run needs task=calibrate and task=profile too.
#     python -m tests.bench.simulated --run outputs/markov-smollm2 --prompts a.jsonl b.jsonl --observations FILE

import argparse
from itertools import count, cycle
from pathlib import Path

import torch

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.contestants import find_entries, target_node
from drafters.decoding.batch import LiveBatch
from drafters.decoding.loop import DecodeConfig, RunTimings
from drafters.door import load_target
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.gate import Gated
from drafters.scheduling.observations import Observations
from drafters.scheduling.policy import Policy, find_costs
from drafters.scheduling.profiler import ProfileConfig, Profiler
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Prefix, Scheduler
from drafters.scheduling.simulate import Replay, SimulateConfig, simulate

SCHEDULERS = {
    "off": Off(),
    "fixed": Fixed(),
    "prefix": Prefix(),
    "asynchronous": Asynchronous(),
    "gated": Gated(inner=Asynchronous()),
}


class Loop:
    """A batch that is always full, with what each of its rounds gained and took."""

    def __init__(self, target, drafter, prompts, policy, *, batch, tokens):
        config = DecodeConfig(max_new_tokens=tokens, batch_size=batch, policy=policy)
        self.live = LiveBatch(target, drafter, config, num_slots=drafter.block_size, timings=RunTimings())
        self.batch, self.prompts, self.numbers = batch, cycle(prompts), count()
        self.gained = []

    @torch.inference_mode()
    def round(self):
        while len(self.live.live) < self.batch:
            number = next(self.numbers)
            self.live.admit([(number, next(self.prompts), number)])
        rows = list(self.live.live)
        before = sum(len(row.tokens) for row in rows)
        self.live.round(self.live.schedule.want(self.batch), None)
        self.gained.append(sum(len(row.tokens) for row in rows) - before)

    @property
    def rounds(self):
        """Tokens and seconds of the rounds that count: the first ones begin at the beginnings of texts."""
        return list(zip(self.gained, (cost.seconds for cost in self.live.timings.rounds), strict=True))[WARMUP:]


WARMUP = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=16, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20, help="of each schedule and batch size in a lap")
    parser.add_argument("--observations", type=Path, required=True)
    args = parser.parse_args()
    entries = find_entries([args.run], {}, key="run")
    target = load_target(target_node(entries, None), device="cpu")
    drafter, folder = entries[0].load(target).drafter, entries[0].run.drafter
    calibration, planned = Calibration.load(folder), find_costs(None, folder)
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=args.each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
    prompts = [dialogue.encode(()) for dialogue in dialogues]
    profiler = Profiler(target, drafter, prompts, ProfileConfig(rows=tuple(args.batch)))
    # Few prompts where few rows are decoded, so that each is come to, as it is in the simulation.
    chosen = {batch: range(0, len(prompts), max(1, len(prompts) // (2 * batch))) for batch in args.batch}
    loops = {}
    for batch in args.batch:
        own = [prompts[i] for i in chosen[batch]]
        for name, scheduler in SCHEDULERS.items():
            policy = Policy(scheduler=scheduler, costs=planned, calibration=calibration)
            loops[batch, name] = Loop(target, drafter, own, policy, batch=batch, tokens=args.tokens)
    for lap in range(args.laps):
        for _ in range(2):
            profiler.lap(counts=lap > 0)
        turn = lap % len(loops)
        for loop in [*loops.values()][turn:] + [*loops.values()][:turn]:
            for _ in range(args.rounds):
                loop.round()
    recorded = Observations.load(args.observations)
    for batch in args.batch:
        kept_N = torch.isin(recorded.prompt_N, torch.tensor(chosen[batch]))
        replay = Replay(recorded.where(kept_N), calibration)
        report(batch, loops, replay, profiler.profile().fit(), planned)


def report(batch, loops, replay, costs, planned) -> None:
    """`costs` are those of these laps; schedules decide by `planned`, as in the loops."""
    settings = SimulateConfig(num_seeds=2, warmup_steps=WARMUP, num_steps=1000)
    print(f"{'batch':>5s} {'schedule':13s} tokens/s:  real simulated  error | tokens a row and round | ms a round")
    for name, scheduler in SCHEDULERS.items():
        tokens, seconds = (sum(values) for values in zip(*loops[batch, name].rounds, strict=True))
        count = len(loops[batch, name].rounds)
        told = simulate(replay, costs, Planned(scheduler, planned), concurrency=batch, config=settings)
        speed, length = told.tokens_per_second.value, told.accepted_length.value
        real = tokens / seconds
        print(
            f"{batch:5d} {name:13s} {real:15.1f} {speed:9.1f} {speed / real - 1:+6.1%} | "
            f"{tokens / count / batch:.2f} {length:.2f} {length * batch * count / tokens - 1:+6.1%} | "
            f"{1000 * seconds / count:6.1f} {1000 * batch * length / speed:6.1f}"
        )


class Planned(Scheduler):
    """A scheduler that decides by costs of its own."""

    def __init__(self, scheduler, costs):
        self.scheduler, self.costs = scheduler, costs

    def begin(self, costs, num_slots):
        return self.scheduler.begin(self.costs, num_slots)


if __name__ == "__main__":
    main()
