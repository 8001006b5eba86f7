# The doctor without a run: what it finds of machine, target, conversations and cache, each broken for real, and what it
# says where nothing is wrong.

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import capture
from data.doctor import answers, frozen, machine, states
from data.doctor import text as texts
from data.doctor.findings import Findings
from drafters.cache_manifest import Manifest
from drafters.errors import CheckpointError, ConfigError
from drafters.storage import LocalFolder
from drafters.target import FrozenTarget
from drafters.types import Example, Needs
from tests.cache_cases import examples
from tests.doctor_cases import CHATML_END, QUICK, case_of, examined, flip, levels, the, world_overrides
from tests.door_world import ROOT, contents, make_world, settings, write_rows
from tests.test_families import sharpened
from tests.tiny import tiny_llama, tiny_target
from tests.tiny_chat import TEMPLATES, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target that stops at its template's end of turn, conversations, and their states."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    config = {"eos_token_id": [2, CHATML_END], "bos_token_id": 1, "pad_token_id": 0}
    (folder / "target" / "generation_config.json").write_text(json.dumps(config))
    capture.run(settings("capture", *world_overrides(folder), "cache.tokens_per_shard=600"))
    return folder


@pytest.fixture
def own(world, tmp_path):
    """A copy of the world to break."""
    return shutil.copytree(world, tmp_path / "own")


def chats(path, *answers, question="Tool?", **fields):
    rows = [
        {"messages": [{"role": "user", "content": f"{question} {i}"}, {"role": "assistant", "content": one}], **fields}
        for i, one in enumerate(answers)
    ]
    return write_rows(path, rows)


def test_a_healthy_world(world, tmp_path, capsys):
    before = contents(world)
    found = examined(*world_overrides(world), f"out={tmp_path}/results", "num_answers=2", "max_new_tokens=8")
    assert not found.has_problem
    expected = {
        *("target/weights", "target/self-check", "target/rope", "text/source", "text/mask", "text/dropped"),
        *(
            "text/truncated",
            "text/ends",
            "text/mask-token",
            "text/overlap",
            "text/prompt",
            "text/thinking",
            "answers/likelihood",
        ),
        *("cache/found", "cache/files", "cache/checksums", "cache/head", "machine/memory", "machine/states"),
    }
    assert {one.check for one in found.all if one.level == "ok"} >= expected
    assert levels(found, "answers/authors") == ["note"]
    assert contents(world) == before
    written = json.loads((tmp_path / "results" / "doctor.json").read_text())
    assert written["healthy"] is True
    assert written["target"] == "tiny"
    assert written["causes"] == []
    assert [one["check"] for one in written["findings"]] == [one.check for one in found.all]
    screen = capsys.readouterr().out
    assert "Be kind. 16<|im_end|>⟧" in screen
    assert "The cache of states" in screen
    assert "Causes of a low accepted length" not in screen  # of a run alone


def test_the_command_says_the_problem_and_exits_with_1(own):
    shard = next((own / "states").rglob("shard-00000.safetensors"))
    flip(shard)
    command = [sys.executable, "-m", "data.doctor", *world_overrides(own), *QUICK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "There is a problem." in done.stdout
    assert "shard-00000" in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["num_answers=-1"], ConfigError, r"num_answers: got -1; accepted: 1 or more, or 0"),
        (["num_answers=x"], ConfigError, r"num_answers: got 'x'"),
        (["max_new_tokens=0"], ConfigError, r"max_new_tokens: got 0; accepted: 1 or more"),
        (["out=''"], ConfigError, r"out: got ''; accepted: a folder, or null"),
        (["out=/dev/null/x"], CheckpointError, r"/dev/null/x: cannot be written"),
        (["checksums=7"], ConfigError, r"checksums: got 7"),
        (["device=tpu9"], ConfigError, r"device: got 'tpu9'.*accepted: null, cpu, cuda"),
        (["run=nowhere"], CheckpointError, r"run: no folder nowhere; give one that train\.py wrote"),
        (["+target.speed=1"], ConfigError, r"target\.speed: unknown setting"),
        (["cache.codec=zip"], ConfigError, r"cache\.codec: got 'zip'|codec.*'zip'"),
        (["data.max_length=1"], ConfigError, r"data\.max_length: got 1; accepted"),
    ],
)
def test_a_wrong_setting_is_an_error_of_the_command(world, overrides, error, message):
    with pytest.raises(error, match=message):
        examined(*world_overrides(world), *QUICK, *overrides)


def test_what_cannot_be_read_is_a_finding(world, tmp_path):
    found = examined(*world_overrides(world), *QUICK, f"source.path={tmp_path}/missing.jsonl")
    assert "no file" in the(found, "text/source", "problem").found
    found = examined(*world_overrides(world), *QUICK, f"target.weights={tmp_path}")
    assert "config.json" in the(found, "target/weights", "problem").found


def test_versions(tmp_path):
    (tmp_path / "constraints.txt").write_text("torch==1.0\nrich==1.0 # old\n")

    def judged(python, *wanted):
        listed = ", ".join(f'"{one}"' for one in wanted)
        (tmp_path / "pyproject.toml").write_text(
            f'[project]\nrequires-python = "{python}"\ndependencies = [{listed}]\n'
        )
        findings = Findings()
        machine.check_versions(findings, tmp_path)
        return findings

    assert levels(judged(">=3.11", "numpy>=1"), "machine/versions") == ["ok"]
    assert "rich 1" in the(judged(">=3.11", "rich>=1"), "machine/versions", "note").found
    assert "asks for <2" in the(judged(">=3.11", "torch<2"), "machine/versions", "problem").found
    assert "not installed" in the(judged(">=3.11", "no-such-thing"), "machine/versions", "problem").found
    assert "is needed" in the(judged(">=4", "numpy"), "machine/versions", "problem").found


def test_the_installed_versions_are_the_project_s_own():
    findings = Findings()
    machine.check_versions(findings, ROOT)
    assert not findings.has_problem


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, level in ((tmp_path / "new" / "er", "ok"), (tmp_path / "file" / "inside", "problem")):
        findings = Findings()
        machine.check_folder(findings, "states", place, "cache.root=")
        assert levels(findings, "machine/states") == [level]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_memory_and_disk(world, monkeypatch):
    monkeypatch.setattr("data.plan.device_memory", lambda device: 1000)
    found = examined(*world_overrides(world), "example=false", "num_answers=0")
    assert "1000" not in the(found, "machine/memory", "problem").found
    assert "do not fit" in the(found, "target/self-check", "note").found
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("data.plan.shutil.disk_usage", lambda path: usage(10, 9, 1))
    found = examined(*world_overrides(world, states="elsewhere"), *QUICK)
    assert levels(found, "cache/found") == ["note"]
    assert "0.00 GB are free" in the(found, "cache/room", "problem").found


def test_the_compiler_that_a_training_wants(world, monkeypatch):
    def absent():
        raise RuntimeError("no compiler")

    overrides = (*world_overrides(world), *QUICK)
    assert not examined(*overrides).named("machine/compiler")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    assert levels(examined(*overrides, "trainer.compile=true"), "machine/compiler") == ["ok"]
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", absent)
    assert "no compiler" in the(examined(*overrides, "trainer.compile=true"), "machine/compiler", "problem").found


def test_a_target_that_fails_its_self_check(own):
    path = own / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][7] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    found = examined(*world_overrides(own), "example=false", "num_answers=2")
    assert "self-check failed" in the(found, "target/self-check", "problem").found
    assert "not measured" in the(found, "answers/likelihood", "note").found
    assert levels(found, "cache/found") == ["note"]  # these are other weights


def test_rope_that_drafters_do_not_share():
    findings, target = Findings(), tiny_target()
    frozen.check_rope(findings, target)
    assert levels(findings, "target/rope") == ["ok"]
    for name, buffer in target.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1.01)
    frozen.check_rope(findings, target)
    assert levels(findings, "target/rope") == ["ok", "note"]


def test_quantized_weights():
    target = tiny_target()
    assert frozen.quantization_of(target) is None
    target.model.config.quantization_config = {"quant_method": "fp8"}
    assert frozen.quantization_of(target) == "fp8"


def test_mask_and_lengths(world, tmp_path):
    def judged(*answers, rows=(), **more):
        path = chats(tmp_path / "chats.jsonl", *answers)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return examined(*world_overrides(world), *QUICK, f"source.path={path}", *(f"{k}={v}" for k, v in more.items()))

    usual = judged(*["Blue."] * 8)
    assert {levels(usual, f"text/{name}")[0] for name in ("mask", "dropped", "truncated")} == {"ok"}
    long = judged(*["The sky is blue. " * 200] * 8, **{"data.max_length": 9000})
    assert "98%" in the(long, "text/mask", "warning").found or "99%" in the(long, "text/mask", "warning").found
    short = judged(*["Blue."] * 8, rows=[{"messages": [{"role": "user", "content": "Alone?"}]}])
    assert "no assistant message" in the(short, "text/dropped", "warning").found
    cut = judged(*["The sky is blue. " * 9] * 8, **{"data.max_length": 60})
    assert "8 of 8 are cut off at 60" in the(cut, "text/truncated", "warning").found
    assert (
        "no conversation is held out"
        in the(judged("Blue.", "Red.", **{"data.validation": 0}), "text/source", "problem").found
    )


def test_a_mask_token_that_conversations_use(world):
    found = examined(*world_overrides(world), *QUICK, f"target.mask_token={CHATML_END}")
    assert "'<|im_end|>' (4) is in 20 of 20" in the(found, "text/mask-token", "warning").found


def test_prompts_that_are_held_out_and_trained_on(world, tmp_path):
    rows = [
        {"prompt": "Tool?", "response": f"Blue {i}.", "split": "validation" if i == 4 else "train"} for i in range(5)
    ]
    path = write_rows(tmp_path / "twice.jsonl", rows)
    found = examined(*world_overrides(world), *QUICK, f"source.path={path}")
    assert "1 of 1 held-out prompts" in the(found, "text/overlap", "warning").found


def test_answers_that_were_cut(world, tmp_path):
    message = {"role": "assistant", "content": "Blue and", "finish_reason": "length"}
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, message]} for i in range(5)]
    found = examined(*world_overrides(world), *QUICK, f"source.path={write_rows(tmp_path / 'a.jsonl', rows)}")
    assert [one.level for one in found.named("text/ends")] == ["note", "note"]
    assert "5 of 5 answers were cut" in found.named("text/ends")[0].found


@pytest.mark.parametrize("template", ["plain", "harmony"])
def test_a_template_without_the_target_s_end_of_turn(own, template):
    tiny_tokenizer(template).save_pretrained(own / "target")
    found = the(examined(*world_overrides(own), *QUICK), "text/ends", "warning").found
    assert found.startswith("0% of 20 whole answers end with a token at which the target stops")


def test_prompts_that_decoding_tokenises_otherwise(world, own):
    assert levels(examined(*world_overrides(world), *QUICK), "text/prompt") == ["ok"]
    tokenizer = tiny_tokenizer("plain", kind="spaces")
    tokenizer.add_tokens([":Blue"])
    tokenizer.chat_template = TEMPLATES["plain"].replace("ASSISTANT:\n", "ASSISTANT:").replace(":\n", ":")
    tokenizer.save_pretrained(own / "target")
    path = chats(own / "blue.jsonl", *["Blue."] * 4)
    found = examined(*world_overrides(own), *QUICK, f"source.path={path}")
    assert the(found, "text/prompt", "warning").found.startswith("4 of 4 prompts give other tokens")


def test_thinking(world, own, tmp_path):
    thinking, plain = "<think>\nHm.\n</think>\n\nBlue.", "Blue."

    def judged(template, answer, **kwargs):
        tokenizer = tiny_tokenizer("qwen3")
        tokenizer.chat_template = TEMPLATES.get(template, template)
        tokenizer.save_pretrained(own / "target")
        given = [f"+data.template_kwargs.{name}={value}" for name, value in kwargs.items()]
        path = chats(tmp_path / "chats.jsonl", *[answer] * 5)
        (found,) = examined(*world_overrides(own), *QUICK, f"source.path={path}", *given).named("text/thinking")
        return found

    assert judged("qwen3", thinking).level == "ok"
    asked = judged("qwen3", plain)
    assert (asked.level, asked.advice.split(",")[0]) == ("warning", "data.template_kwargs={enable_thinking: false}")
    assert judged("qwen3", plain, enable_thinking="false").level == "ok"
    assert judged("chatml", thinking).level == "ok"
    strips = TEMPLATES["chatml"].replace("m.content", "m.content.split('</think>')[-1]")
    stripped = judged(strips, thinking)
    assert (stripped.level, "5 of them the template takes the thinking out" in stripped.found) == ("warning", True)


def test_who_answered():
    Said = namedtuple("Said", "answered_by")
    for authors, level in ((["a", "a"], "ok"), (["a", None], "note"), (["a", "b", None], "warning")):
        findings = Findings()
        texts.check_authors(findings, [Said(one) for one in authors], "a")
        assert levels(findings, "answers/authors") == [level]


def test_answers_of_somebody_else_are_measured(world):
    case = case_of(*world_overrides(world), "num_answers=6", "max_new_tokens=24")
    case.target = FrozenTarget.from_model(sharpened(tiny_llama()), mask_token_id=3)
    random = examples(6, longest=40)
    case.splits = {"train": [], "validation": random}
    answers.check(case)
    (foreign,) = case.findings.named("answers/likelihood")
    assert foreign.level == "warning"
    assert foreign.is_cause
    own = answers._answered(case, answers.openings(random, 6, 24))
    measured = answers.likelihood(case.target, own)
    assert not measured.is_foreign
    # The naive twin, token by token.
    hits = log_p = excess = count = 0
    for tokens_T, start in own:
        for t in range(start, len(tokens_T)):
            last = case.target.states(tokens_T[None, :t], needs=Needs(last=True)).last_BTD[0, -1:]
            p = case.target.head.logits(last)[0].double().softmax(-1)
            token = int(tokens_T[t])
            hits += int(p.argmax()) == token
            log_p += float(p[token].log())
            excess += float(-p[token].log() + (p * p.log()).nansum())
            count += 1
    assert measured.num_tokens == count
    assert measured.likeliest == hits / count
    assert measured.log_p == pytest.approx(log_p / count, abs=1e-4)
    assert measured.excess == pytest.approx(excess / count, abs=1e-4)


def test_openings_are_first_answers():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1]).bool()
    one = Example(id="a", source="s", tokens_T=torch.arange(7), loss_mask_T=mask)
    assert [(row.tolist(), start) for row, start in answers.openings([one], 3, 9)] == [([0, 1, 2, 3, 4], 2)]
    assert [(row.tolist(), start) for row, start in answers.openings([one], 3, 2)] == [([0, 1, 2, 3], 2)]


def test_damage_in_the_cache(own):
    overrides = (*world_overrides(own), *QUICK)
    folder = next((own / "states").glob("tiny-*"))
    assert levels(examined(*overrides), "cache/checksums") == ["ok"]
    (folder / "notes.txt").write_text("mine")
    assert "notes.txt" in the(examined(*overrides), "cache/files", "note").found
    asked = examined(*overrides, "cache.layer_ids=[0,1]")
    assert "not [1]" in the(asked, "cache/layers", "problem").found
    first, second = sorted(folder.glob("shard-*.safetensors"))[:2]
    flip(second)
    found = examined(*overrides)
    assert str(second) in the(found, "cache/checksums", "problem").found
    assert levels(examined(*overrides, "checksums=false"), "cache/checksums") == ["note"]
    first.write_bytes(first.read_bytes()[:-1])
    assert first.name in the(examined(*overrides), "cache/shards", "problem").found
    (folder / "cache.json").write_text("{")
    assert "is damaged" in the(examined(*overrides), "cache/found", "problem").found


def test_lists_and_head_of_the_cache(own):
    folder = next((own / "states").glob("tiny-*"))
    case = case_of(*world_overrides(own), *QUICK)
    assert texts.check(case)
    states.check(case)
    case.target = FrozenTarget.load(str(own / "target"), dtype="float32", mask_token=0)
    states.check_head_fits(case)
    assert levels(case.findings, "cache/head") == ["ok"]
    case.target.head.lm_head_VD = case.target.head.lm_head_VD + 1.0
    states.check_head_fits(case)
    assert "do not fit" in the(case.findings, "cache/head", "problem").found
    flip(folder / "samples.json")
    found = examined(*world_overrides(own), *QUICK)
    assert "checksum is wrong" in the(found, "cache/lists", "problem").found


def test_other_caches_beside_it(own):
    folder = next((own / "states").glob("tiny-*"))
    shutil.copytree(folder, folder.with_name("tiny-000000000000"))
    foreign = shutil.copytree(folder, folder.with_name("other-000000000000"))
    manifest = Manifest.load(LocalFolder(foreign))
    replace(manifest, key=replace(manifest.key, weights_hash="f" * 64)).save(LocalFolder(foreign))
    found = the(examined(*world_overrides(own), *QUICK), "cache/others", "note").found
    assert "2 other caches" in found
    assert "other-000000000000 (other target)" in found
    assert "tiny-000000000000 (other conversations or settings)" in found
