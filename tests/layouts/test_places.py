"""Where keys are: in the main file, in one that it names, in the launcher's own, or in one that the launcher's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import ConfigError
from memplan.layouts.places import Places, is_one_of
from memplan.layouts.schema import LayoutPart, NamedFile, OptionalPrefix
from memplan.layouts.sources import ParsedFiles

NAMED = (NamedFile(name="deepspeed", key="deepspeed"), NamedFile(name="deepspeed", key="launch.config.file"))
PREFIXES = (OptionalPrefix(below="fsdp", prefix="fsdp_"), OptionalPrefix(below="launch.config", prefix="own_"))
LAYOUT = LayoutPart(named_files=NAMED, optional_prefixes=PREFIXES)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A recipe, a launcher's file that names another, and that one."""
    (tmp_path / "recipe.yaml").write_text("bf16: true\nlist: [1]\nfsdp: {fsdp_version: 2, policy: size, fsdp_policy: block}\n")
    (tmp_path / "launch.yaml").write_text("kind: FSDP\nconfig:\n  file: zero.json\n  own_port: 1\n")
    (tmp_path / "zero.json").write_text('{"stage": 3}')
    return Places(tmp_path / "recipe.yaml", tmp_path / "launch.yaml", LAYOUT, ParsedFiles())


@pytest.mark.parametrize(
    ("key", "file", "spelling"),
    [
        ("bf16", "recipe.yaml", "true"),
        ("list", "recipe.yaml", "a sequence"),
        ("nothing", "recipe.yaml", ""),
        ("launch.kind", "launch.yaml", "FSDP"),
        ("deepspeed", "launch.yaml", "zero.json"),
        ("deepspeed.stage", "zero.json", "3"),
        ("fsdp.version", "recipe.yaml", "2"),
        ("fsdp.policy", "recipe.yaml", "size"),
        ("fsdp.nothing", "recipe.yaml", ""),
        ("launch.config.port", "launch.yaml", "1"),
    ],
)
def test_a_key_is_in_the_file_that_it_is_said_in(places: Places, tmp_path: Path, key: str, file: str, spelling: str) -> None:
    """What names a further file stands in the file that names it; what is below it, there. A prefix that may be there is found."""
    main = tmp_path / "recipe.yaml"

    assert places.of(main, key).file.name == file
    assert places.spelling(main, key) == spelling


def test_a_name_that_is_too_long_for_a_file_is_that_of_none(places: Places, tmp_path: Path) -> None:
    """The system refuses to look for it."""
    (tmp_path / "launch.yaml").write_text(f"config:\n  file: {'é' * 300}\n")

    with pytest.raises(ConfigError, match=r"launch\.yaml:2: `config\.file` names é+, which is neither beside it nor below"):
        places.of(tmp_path / "recipe.yaml", "deepspeed.stage")


def test_conditions_look_into_all_of_them(places: Places) -> None:
    """An empty text is a key that is not there, a star any that is."""
    assert places.holds({"bf16": ("true",), "launch.kind": ("*",), "deepspeed.stage": ("2", "3"), "nothing": ("",)})
    assert not places.holds({"launch.kind": ("DEEPSPEED",)})


@pytest.mark.parametrize(
    ("spelling", "spellings", "is_one"),
    [
        ("a.LossOfChunks", ("*LossOfChunks",), True),
        ("a.LossOfChunks", ("b.*", "a.*"), True),
        ("a.Loss", ("*LossOfChunks",), False),
        ("anything", ("*",), True),
        ("", ("*",), False),
        ("", ("", "*Loss"), True),
        ("off", ("false",), True),
    ],
)
def test_a_star_stands_for_any_text(spelling: str, spellings: tuple[str, ...], is_one: bool) -> None:
    """By itself for any but an empty one; switches of YAML 1.1 are read as its programs read them."""
    assert is_one_of(spelling, spellings) is is_one
