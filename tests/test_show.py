# The door as a user calls it: what it prints, its one-line errors, its exit codes.

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from data.show import CONF, show
from drafters.config import build_config
from drafters.errors import ConfigError, DataError
from tests.tiny_chat import tiny_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": "Sky [red]?"}, {"role": "assistant", "content": "Blue."}]},
    {"messages": [{"role": "user", "content": "Grass?"}]},
]


@pytest.fixture
def files(tmp_path):
    """A tokenizer folder and a file of conversations."""
    tiny_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [f"tokenizer={tmp_path / 'tokenizer'}", "source=jsonl", f"source.path={tmp_path / 'chats.jsonl'}"]


def composed(*overrides, name="show"):
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=CONF):
        return compose(name, overrides=list(overrides))


def test_supervised_tokens_stand_out(files, capsys):
    show(composed(*files))
    out = capsys.readouterr().out
    assert "<|im_start|>user\nSky [red]?<|im_end|>\n<|im_start|>assistant\n⟦Blue.<|im_end|>⟧\n" in out
    assert "tokens supervised" in out
    assert "not used: conversation 'chats:2' of source 'chats': it has no assistant message" in out


def test_ids_are_printed_as_they_are(files, tmp_path, capsys):
    names = ["[bold]one[/bold]", "[/nothing]", "[link=x]"]
    rows = "".join(json.dumps({"id": name, **ROWS[0]}) + "\n" for name in names)
    (tmp_path / "chats.jsonl").write_text(rows)
    show(composed(*files, "n=3"))
    out = capsys.readouterr().out
    assert all(f" {name} (chats) " in out for name in names)


def test_n_conversations_are_shown(files, capsys):
    show(composed(*files, "n=1"))
    assert "chats:2" not in capsys.readouterr().out


def test_truncation_is_said(files, capsys):
    show(composed(*files, "n=1", "max_length=34"))
    assert "34 tokens supervised, cut off at 34 tokens" in capsys.readouterr().out


def test_bad_settings(files, tmp_path):
    with pytest.raises(ConfigError, match="n: got 0; accepted"):
        show(composed(*files, "n=0"))
    for key in ("n", "max_length", "template_kwargs"):
        with pytest.raises(ConfigError, match=rf"^{key}: got 'abc'"):
            show(composed(*files, f"{key}=abc"))
    with pytest.raises(ConfigError, match="tokenizer: no folder 'nope'"):
        show(composed(*files, "tokenizer=nope"))
    with pytest.raises(ConfigError, match="tokenizer: none in"):
        show(composed(*files, f"tokenizer={tmp_path}"))


def test_a_source_without_answers_is_an_error(files, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[1]))
    with pytest.raises(DataError, match="no assistant message"):
        show(composed(*files))


@pytest.mark.parametrize("path", sorted(Path(CONF, "source").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_source_yaml_fits_its_class(path):
    node = OmegaConf.load(path)
    for key, value in node.items_ex(resolve=False):
        if value == "???":
            node[key] = "filled-in"
    cls, config = build_config(node, key="source")
    assert isinstance(config, cls)


def test_the_door_exits_with_one_line(files, tmp_path):
    command = [sys.executable, "-m", "data.show", *files, f"source.path={tmp_path / 'nope.jsonl'}"]
    done = subprocess.run(command, cwd=Path(CONF).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: source.path: no file")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
