# Ways to call evaluate.py in process, for the tests of it: on a run that was not trained, up to the measurement or
# through it.

from types import SimpleNamespace

import evaluate
from tests.door_world import make_run, settings, write_rows

# A target in place of the run's own, for the weights that follow as target.weights=.
OTHER = ("target=smollm2", "target.sha256=null", "target.mask_token=0", "target.dtype=float32")


def evaluation_run(world):
    """The folder of a run; beside the prompts of the world there are some of two turns, pairs.jsonl."""
    write_rows(world / "pairs.jsonl", [{"turns": [f"What is {i}?", "And then?"]} for i in range(2)])
    return make_run(world, "run")


def on(world, name="maths"):
    """Settings of a short measurement on prompts of the world."""
    return ("source=jsonl", f"source.path={world}/{name}.jsonl", "device=cpu", "max_new_tokens=14", "profile_rounds=2")


def evaluated(*overrides):
    evaluate.evaluate(settings("evaluate", *overrides))


def up_to_the_measurement(run, monkeypatch):
    """A function that runs evaluate.py so far and gives what would be measured and written."""

    def call(*overrides, names=(f"run={run}",)):
        seen = []

        def take(target, contestants, dialogues, config, place):
            seen.append(SimpleNamespace(dialogues=dialogues, config=config, place=place))
            return {}

        monkeypatch.setattr("drafters.door.measure_and_write", take)
        evaluated(*names, "device=cpu", "max_new_tokens=14", *overrides)
        (one,) = seen
        return one

    return call


def prompts_of(found):
    """The first prompts of what would be measured."""
    return [one.encode([]).tolist() for one in found.dialogues]
