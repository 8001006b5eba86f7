# YAML nodes become typed objects, and whatever is wrong with them is said with the dotted key.

from dataclasses import dataclass, field

import pytest
from omegaconf import OmegaConf

from drafters.config import build_config, locate, to_plain, typed
from drafters.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rank: int = 8
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Strict:
    must: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: int
    rate: float = 0.5
    flag: bool = True
    ids: tuple[int, ...] = (1, 2)
    betas: tuple[float, float] | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    strict: Strict | None = None

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"size: got {self.size}; accepted: 0 or more")


class Thing:
    Config = Settings


class Bare:
    pass


HERE = __name__


def make(text, key="drafter"):
    return typed(Settings, OmegaConf.create(text), key=key)


def test_a_full_node_becomes_the_dataclass():
    got = make(
        "{size: 3, rate: 1, flag: false, ids: [4, 5, 6], betas: [0.9, 0.95], inner: {rank: 2}, maybe: {name: x}}"
    )
    assert got == Settings(
        size=3, rate=1.0, flag=False, ids=(4, 5, 6), betas=(0.9, 0.95), inner=Inner(rank=2), maybe=Inner(name="x")
    )
    assert isinstance(got.ids, tuple)
    assert isinstance(got.betas, tuple)
    assert isinstance(got.maybe, Inner)


def test_defaults_fill_the_rest():
    got = make("{size: 3}")
    assert got == Settings(size=3)
    assert isinstance(got.inner, Inner)
    assert got.maybe is None
    assert make("{size: 3, inner: {}, ids: []}") == Settings(size=3, ids=())


def test_plain_dicts_and_interpolations_are_taken_too():
    assert typed(Settings, {"size": 3, "ids": (7,)}, key="x") == Settings(size=3, ids=(7,))
    root = OmegaConf.create({"n": 9, "drafter": {"size": "${n}", "_target_": "left.out"}})
    assert typed(Settings, root.drafter, key="drafter") == Settings(size=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{size: 3, raet: 1}",
            r"^drafter\.raet: unknown setting; accepted: size, rate, flag, ids, betas, inner, maybe, strict$",
        ),
        ("{size: 3, inner: {rnak: 1}}", r"^drafter\.inner\.rnak: unknown setting; accepted: rank, name$"),
        ("{size: 3, maybe: {rnak: 1}}", r"^drafter\.maybe\.rnak: unknown setting"),
        ("{rate: 1}", r"^drafter\.size: missing; it has no default"),
        ("size: ???", r"^drafter\.size: missing; it has no default"),
        ("{size: 3, inner: null}", r"^drafter\.inner: got None;"),
        ("{size: 3, strict: {}}", r"^drafter\.strict\.must: missing; it has no default"),
        ("{size: abc}", r"^drafter\.size: got 'abc'; .*Integer"),
        ("{size: 1.5}", r"^drafter\.size: got 1\.5;"),
        ("{size: null}", r"^drafter\.size: got None;"),
        ("{size: 3, flag: maybe}", r"^drafter\.flag: got 'maybe';"),
        ("{size: 3, ids: [1, x]}", r"^drafter\.ids\[1\]: got 'x';"),
        ("{size: 3, ids: 4}", r"^drafter\.ids: got 4;"),
        ("{size: 3, inner: {rank: high}}", r"^drafter\.inner\.rank: got 'high';"),
        ("{size: 3, inner: 5}", r"^drafter\.inner: got 5; expected settings by name: rank, name"),
        ("{size: -1}", r"^drafter.size: got -1; accepted: 0 or more"),
        ("[1, 2]", r"^drafter: got \[1, 2\]; expected settings by name: size"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        make(text)
    assert "\n" not in str(error.value)


def test_an_empty_node_misses_what_has_no_default():
    with pytest.raises(ConfigError, match=r"drafter\.size: missing"):
        typed(Settings, None, key="drafter")
    assert typed(Inner, None, key="x") == Inner()


def test_target_names_a_class_and_its_config_types_the_rest():
    cls, config = build_config({"_target_": f"{HERE}.Thing", "size": 3}, key="drafter")
    assert (cls, config) == (Thing, Settings(size=3))
    cls, config = build_config(OmegaConf.create({"_target_": f"{HERE}.Inner", "rank": 3}), key="drafter")
    assert (cls, config) == (Inner, Inner(rank=3))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"size": 3}, r"^drafter: needs a `_target_`"),
        (None, r"^drafter: needs a `_target_`"),
        ({"_target_": "Thing"}, r"^drafter\._target_: 'Thing' is not a dotted path"),
        ({"_target_": f"{HERE}.Thong"}, rf"^drafter\._target_: module '{HERE}' has no 'Thong'"),
        ({"_target_": "drafters.heads.nowhere.X"}, r"^drafter\._target_: no module 'drafters\.heads\.nowhere'"),
        ({"_target_": "nowhere.X"}, r"^drafter\._target_: no module 'nowhere' for 'nowhere\.X'; is its folder on PYTH"),
        ({"_target_": f"{HERE}.Bare"}, r"is no class with a dataclass `Config`"),
        ({"_target_": f"{HERE}.make"}, r"is no class with a dataclass `Config`"),
        ({"_target_": f"{HERE}.Thing", "sizes": 3}, r"^drafter\.sizes: unknown setting"),
    ],
)
def test_targets_that_lead_nowhere_are_named(node, message):
    with pytest.raises(ConfigError, match=message):
        build_config(node, key="drafter")


def test_a_module_that_cannot_import_its_own_needs_is_a_bug_not_a_setting(tmp_path, monkeypatch):
    (tmp_path / "mine_with_a_hole.py").write_text("import not_there_at_all\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        locate("mine_with_a_hole.X")


def test_to_plain_leaves_other_values_alone():
    assert to_plain(OmegaConf.create({"a": [1, {"b": "${a[0]}"}]})) == {"a": [1, {"b": 1}]}
    assert to_plain(7) == 7
