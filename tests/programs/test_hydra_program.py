"""Which keys of a configuration that Hydra composes hold the batch and the accumulation, and in which file each stands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.programs import hydra_program
from memplan.programs.hydra_program import commands_for, composed_by_hydra, hydra_app

TREE = Path(__file__).parents[1] / "trees" / "hydra"

ACCUMULATION = "gradient_accumulation_steps=configs/trainer/default.yaml:accumulate_grad_batches"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree, in which the commands run."""
    folder = Path(shutil.copytree(TREE, tmp_path / "project"))
    monkeypatch.chdir(folder)
    return folder


def found(*words: str) -> list[str]:
    """What is found for the script and *words*."""
    app = hydra_app(["python", "train.py", *words])
    assert app is not None
    return composed_by_hydra(app).fields()


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ([], "configs/data/images.yaml:batch_size"),
        (["data=images", "model.width=512", "+new=1"], "configs/data/images.yaml:batch_size"),
        (["experiment=large"], "configs/experiment/large.yaml:data.batch_size"),
        (["experiment=shared"], "configs/experiment/shared.yaml:batch.of_training"),
        (["data=shared", "+batch.of_training=8", "experiment=large"], "configs/experiment/large.yaml:data.batch_size"),
    ],
    ids=["a group's file", "other words", "an experiment that overrides it", "a reference", "an experiment over a reference"],
)
@pytest.mark.usefixtures("project")
def test_the_last_file_of_the_composition_that_has_a_key_holds_it(words: list[str], batch: str) -> None:
    """In the order of Hydra's defaults lists; a file of `@package _global_` has the whole path."""
    assert found(*words) == [f"micro_batch_size={batch}", ACCUMULATION]


def test_what_trainers_have_for_validation_is_not_the_batch(project: Path) -> None:
    """Whatever it is called, and whatever group it is in."""
    (project / "configs" / "data" / "images.yaml").write_text(
        "val: {batch_size: 8}\nloader: {batch_size: 16}\ntest_loader: {batch_size: 1}\n"
    )

    assert found()[0] == "micro_batch_size=configs/data/images.yaml:loader.batch_size"


def test_of_several_keys_that_of_the_training_is_the_batch(project: Path) -> None:
    """Else memplan does not choose."""
    data = project / "configs" / "data" / "images.yaml"
    data.write_text("train: {batch_size: 8}\nqueue: {batch_size: 16}\n")
    assert found()[0] == "micro_batch_size=configs/data/images.yaml:train.batch_size"

    data.write_text("batch_size: {train: 8, val: 16}\n")
    assert found()[0] == "micro_batch_size=configs/data/images.yaml:batch_size.train"

    data.write_text("bank: {batch_size: 8}\nqueue: {batch_size: 16}\n")
    with pytest.raises(
        UsageError, match=r"several keys that may be the one: `data.bank.batch_size` .* and `data.queue.batch_size`"
    ) as raised:
        found()
    assert raised.value.hint == 'name it: `fields=["micro_batch_size=configs/data/images.yaml:bank.batch_size"]`'


@pytest.mark.parametrize(
    ("words", "content", "problem"),
    [
        (["data.batch_size=32"], None, r"which the command sets: `data\.batch_size=32`"),
        ([], "batch_size: ${mul:2,4}\n", r"which is computed: \$\{mul:2,4\}"),
        (["data=shared", "+batch.of_training=8"], None, r"which the command sets: `\+batch\.of_training=8`"),
    ],
    ids=["by an override", "computed", "by an override of what it refers to"],
)
def test_a_batch_that_no_file_holds_is_refused(project: Path, words: list[str], content: str | None, problem: str) -> None:
    """With where to write the variable instead."""
    if content is not None:
        (project / "configs" / "data" / "images.yaml").write_text(content)

    with pytest.raises(UsageError, match=problem) as raised:
        found(*words)

    assert raised.value.hint is not None
    assert "batch_size={micro_batch_size}` into the command" in raised.value.hint or "of_training={micro_batch_size}" in raised.value.hint


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["trainer=big"], "Could not find 'trainer/big'"),
        (["none=there"], "Could not override 'none'"),
        (["data.size=1"], "Could not override"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_hydra_refuses_is_told_with_a_place_to_name(words: list[str], problem: str) -> None:
    """Its own words, and a key of the files that may be the batch."""
    with pytest.raises(UsageError, match=problem) as raised:
        found(*words)

    assert raised.value.hint == 'name the place: `fields=["micro_batch_size=configs/data/images.yaml:batch_size"]`'


@pytest.mark.usefixtures("project")
def test_without_hydra_a_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in the program's environment alone."""
    monkeypatch.setattr(hydra_program, "find_spec", lambda _: None)

    with pytest.raises(UsageError, match=r"train\.py is configured by Hydra, which is not installed here") as raised:
        found()

    assert raised.value.hint is not None
    assert "micro_batch_size=configs/data/images.yaml:batch_size" in raised.value.hint


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nproc-per-node", "1", "train.py"],
        ["python", "-m", "train"],
        ["python", "train.py", "--config-name=train"],
        ["python", "train.py", "-cn", "train", "--config-path", "configs"],
    ],
)
def test_the_script_is_found_in_the_command(project: Path, words: list[str]) -> None:
    """Behind a launcher, as a module, with Hydra's own options."""
    app = hydra_app(words)

    assert app is not None
    assert (app.script, app.folder, app.config_name) == (Path("train.py"), project / "configs", "train")


@pytest.mark.parametrize(
    "text",
    ["print(1)", "import hydra\ndef f(): ...", "import hydra\n@hydra.main(version_base=None)\ndef f(c): ...", "(", "@main()\ndef f(): ..."],
)
def test_another_script_is_no_hydra_program(project: Path, text: str) -> None:
    """Nor is one without a folder of configurations."""
    (project / "train.py").write_text(text)

    assert hydra_app(["python", "train.py"]) is None


@pytest.mark.parametrize(
    "said",
    [
        'config_path=FOLDER, config_name="train"',
        "**PARAMETERS",
        'config_path=str(ROOT / "configs"), config_name="train"',
        'config_path=os.path.join(os.path.dirname(__file__), "configs"), config_name="train.yaml"',
        '"configs", "train"',
    ],
)
def test_the_folder_is_read_from_the_script_as_far_as_it_says_it(project: Path, said: str) -> None:
    """A constant, a dict of arguments, a path that begins with what only a run knows; nothing of the script is run."""
    above = (
        'import hydra, os\nROOT = search()\nFOLDER = "configs"\n'
        'PARAMETERS = {"config_path": str(ROOT / "configs"), "config_name": "train"}\n'
    )
    (project / "train.py").write_text(f"{above}\n@hydra.main({said}, version_base=None)\ndef main(config): ...\n")

    assert found()[0] == "micro_batch_size=configs/data/images.yaml:batch_size"


@pytest.mark.parametrize(
    ("place", "command"),
    [
        (".", "python train.py"),
        ("configs", "python train.py"),
        ("configs/train.yaml", "python train.py"),
        ("configs/data/images.yaml", "python train.py"),
        ("configs/data/shared.yaml", "python train.py"),
        ("configs/trainer/long.yaml", "python train.py trainer=long"),
        ("configs/experiment/large.yaml", "python train.py experiment=large"),
    ],
)
def test_the_command_is_found_for_a_file_of_the_configuration(project: Path, place: str, command: str) -> None:
    """With the word that chooses the file, where Hydra takes it: `data=shared` refers to what only an experiment has, and composes."""
    (project / "eval.py").write_text((project / "train.py").read_text())
    expected = [*command.split(), *(["data=shared"] if place.endswith("data/shared.yaml") else [])]

    assert commands_for(project / place) == [expected]


def test_of_several_scripts_that_which_begins_with_a_file_comes_first(project: Path) -> None:
    """Before those called train, which could read it too."""
    (project / "configs" / "ppo.yaml").write_text((project / "configs" / "train.yaml").read_text())
    (project / "main.py").write_text((project / "train.py").read_text().replace('"train"', '"ppo"'))

    assert [command[1] for command in commands_for(project / "configs" / "ppo.yaml")] == ["main.py", "train.py"]
    assert [command[1] for command in commands_for(project / "configs" / "train.yaml")] == ["train.py", "main.py"]


def test_a_project_does_not_train_by_the_scripts_of_its_tests(project: Path) -> None:
    """A library that tests itself on such a program is planned as a folder without one; the folder of the tests is not."""
    inner = project / "library" / "tests" / "program"
    inner.mkdir(parents=True)
    for name in ("train.py", "configs"):
        (project / name).rename(inner / name)

    assert commands_for(project / "library") == []
    assert [command[0] for command in commands_for(inner.parent)] == ["python"]
    assert [command[0] for command in commands_for(inner / "configs" / "train.yaml")] == ["python"]


def test_no_command_is_found_for_a_file_of_something_else(project: Path) -> None:
    """Whatever lies beside the configuration."""
    (project / "other.yaml").write_text("batch_size: 8\n")

    assert commands_for(project / "other.yaml") == []
