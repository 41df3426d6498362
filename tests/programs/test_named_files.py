"""Which keys of the files that a command names hold the batch and the accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import EditRefusedError, UsageError
from memplan.programs.named_files import (
    absent_in,
    composed_by_words,
    constant_of,
    fields_of_files_below,
    fields_of_sources,
    unreadable_in,
    variables_in,
)

ARGUMENTS = "def plot(batch_size=4): ...\nrun(batch_size=2)\n"

FILES = {
    "base.yaml": "trainer:\n  accumulate_grad_batches: 2\ndata:\n  init_args:\n    batch_size: 32\n    num_workers: 4\n",
    "large.yaml": "data:\n  init_args:\n    batch_size: 128\n",
    "data.yaml": "class_path: Words\ninit_args: {batch_size: 8, eval_batch_size: 16}\n",
    "flat.yml": "batch_size: 4\nval_batch_size: 64\nlr: 1e-3\n",
    "refers.yaml": "size: 16\nloader: {batch_size: '${size}'}\n",
    "ppo.yaml": "data: {train_batch_size: 1024}\nactor: {ppo_micro_batch_size_per_gpu: null}\n",
    "two.yaml": "bank: {batch_size: 1}\nqueue: {batch_size: 2}\n",
    "config.json": '{"train": {"batch_size": 12}}',
    "broken.yaml": "a: [\n",
    "twice.yaml": "batch_size: 1\nbatch_size: 2\n",
    "another_twice.yaml": "lr: 1.0\nbatch_size: 16\nlr: 2.0\n",
    "words.yaml": "batch_size: auto\n",
    "commented.json": '{\n  "loader": {"dataloader_batch_size": 8}  // samples\n}\n',
    "device.yaml": "device_batch_size: 8\n",
    "capitals.yaml": "TRAIN: {BATCH_SIZE: 8}\nTEST: {BATCH_SIZE: 1}\n",
    "small.py": "batch_size = 12\ngradient_accumulation_steps = 5 * 8\n",
    "dataloaders.py": "train_dataloader = dict(batch_size=32)\nval_dataloader = dict(batch_size=1)\n",
    "plain.toml": "[training]\nlocal_batch_size = 4\nbatch_size = 8\n",
    "train.py": "from conf.base import Base\nimport torch\nbatch_size = Base.size\n",
    "hard_coded.py": "import torch\nimport plain\n\nBATCH_SIZE = 64\n",
    "imports.py": "import hard_coded\nfrom pack import *\n",
    "start.sh": "BATCH_SIZE=${1:-64}\npython train.py --batch-size $BATCH_SIZE --grad-accum-steps 4 --eval-batch-size 1\n",
    "uses.py": "SIZE = 8\ndef main(batch_size=SIZE):\n    loader = DataLoader(data, batch_size=batch_size)\n",
    "computed.py": "import os\nbatch_size = 4 * int(os.environ['N'])\nsampler = dict(batch_size=2)\n",
    "evaluated.py": "class EvalConfig:\n    batch_size = 64\ntestloader = dict(batch_size=64)\n" + ARGUMENTS,
    "program.py": "batch_size = 3\nif __name__ == '__main__':\n    run()\n",
    "divided.py": "batch_size = 12\ngradient_accumulation_steps = 40\nif many:\n    gradient_accumulation_steps //= many\n",
    "trainer.py": "def config():\n    C.batch_size = 64\n    return C\ndef run(config):\n    load(batch_size=config.batch_size)\n",
    "two_uses.yaml": "batch_size: {train: 32, val: 16}\nloader: {batch_size: 8}\n",
    "two_sizes.py": "def a(batch_size=1): ...\ndef b(batch_size=2): ...\n",
    "text.py": "print 2\n",
    "library.py": "class Loader:\n    def __init__(self):\n        self.batch_size = 1\n",
    "uses_library.py": "from library import Loader\n",
    "never.py": "BATCH_SIZE = 16\nACCUMULATION_STEPS = 0\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these files, in which the commands run."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(command: str) -> list[str]:
    """What is found for *command*."""
    composed = composed_by_words(command.split())
    return composed.fields() if composed is not None else []


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("train.py flat.yml", ["micro_batch_size=flat.yml:batch_size"]),
        ("train.py --config=flat.yml --lr 1", ["micro_batch_size=flat.yml:batch_size"]),
        ("train.py --cfg config.json", ["micro_batch_size=config.json:train.batch_size"]),
        ("train.py refers.yaml", ["micro_batch_size=refers.yaml:size"]),
        (
            "main.py fit --config base.yaml --config large.yaml",
            [
                "micro_batch_size=large.yaml:data.init_args.batch_size",
                "gradient_accumulation_steps=base.yaml:trainer.accumulate_grad_batches",
            ],
        ),
        (
            "main.py fit --config large.yaml --config base.yaml",
            [
                "micro_batch_size=base.yaml:data.init_args.batch_size",
                "gradient_accumulation_steps=base.yaml:trainer.accumulate_grad_batches",
            ],
        ),
        ("main.py fit --data data.yaml", ["micro_batch_size=data.yaml:init_args.batch_size"]),
        ("main.py fit --data data.yaml broken.yaml missing.yaml", ["micro_batch_size=data.yaml:init_args.batch_size"]),
        ("train.py words.yaml", []),
        ("train.py device.yaml", ["micro_batch_size=device.yaml:device_batch_size"]),
        ("train.py", []),
        ("train.py capitals.yaml", ["micro_batch_size=capitals.yaml:TRAIN.BATCH_SIZE"]),
        ("train.py small.py", ["micro_batch_size=small.py:batch_size", "gradient_accumulation_steps=small.py:gradient_accumulation_steps"]),
        ("torchrun --nproc-per-node 2 train.py --config=dataloaders.py", ["micro_batch_size=dataloaders.py:train_dataloader.batch_size"]),
        ("python -m torch.distributed.run small.py", []),
        ("python -m small hard_coded.py", ["micro_batch_size=hard_coded.py:BATCH_SIZE"]),
        (
            "train.py flat.yml small.py",
            ["micro_batch_size=small.py:batch_size", "gradient_accumulation_steps=small.py:gradient_accumulation_steps"],
        ),
        ("train.py plain.toml", ["micro_batch_size=plain.toml:training.local_batch_size"]),
        ("train.py text.py", []),
        ("train.py evaluated.py", []),
        ("train.py program.py", []),
        ("train.py two_uses.yaml", ["micro_batch_size=two_uses.yaml:batch_size.train"]),
        ("train.py uses.py", ["micro_batch_size=uses.py:SIZE"]),
        ("bash start.sh", []),
        ("train.py another_twice.yaml", ["micro_batch_size=another_twice.yaml:batch_size"]),
    ],
)
def test_the_last_file_that_has_the_key_holds_it(command: str, fields: list[str]) -> None:
    """A file that cannot be read as one configuration is none."""
    assert found(command) == fields


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("main.py fit --config base.yaml --data.init_args.batch_size 64", r"which the command sets: `--data\.init_args\.batch_size 64`"),
        ("train.py flat.yml --batch-size=64", r"which the command sets: `--batch-size=64`"),
        (
            "train.py dataloaders.py --cfg-options train_dataloader.batch_size=64",
            r"which the command sets: `train_dataloader\.batch_size=64`",
        ),
        ("train.py dataloaders.py train_dataloader.batch_size=64", r"which the command sets: `train_dataloader\.batch_size=64`"),
        ("train.py capitals.yaml --batch_size 64", r"which the command sets: `--batch_size 64`"),
        ("train.py capitals.yaml TRAIN.BATCH_SIZE 64", r"which the command sets: `TRAIN\.BATCH_SIZE 64`"),
        ("train.py computed.py", r"several keys that may be the one: .* `batch_size` \(which is computed"),
        ("train.py two.yaml", r"several keys that may be the one: `bank\.batch_size` \(two\.yaml\) and `queue\.batch_size`"),
        (
            "train.py ppo.yaml",
            r"`data\.train_batch_size` of ppo\.yaml may be the batch of several micro-batches: it has `actor\.ppo_micro_batch",
        ),
    ],
)
def test_what_is_not_certain_is_not_guessed(command: str, problem: str) -> None:
    """The option of a key's name goes before the files; of two keys memplan takes neither."""
    with pytest.raises(UsageError, match=problem) as raised:
        found(command)

    assert raised.value.hint is not None
    assert "micro_batch_size" in raised.value.hint


def test_a_batch_that_is_set_twice_in_its_file_is_not_written() -> None:
    """Programs take the last one of such keys; a reader may take the first."""
    with pytest.raises(EditRefusedError, match="`batch_size` stands 2 times"):
        found("train.py twice.yaml")


@pytest.mark.parametrize(
    ("script", "command", "placed"),
    [
        ("parser.add_argument('--batchSize', type=int, default=64)", "main.py --lr 1", "main.py --lr 1 --batchSize {micro_batch_size}"),
        ("p.add_argument('-b', '--batch-size', default=4)", "main.py", "main.py --batch-size {micro_batch_size}"),
        ("p.add_argument('-b', '--batch-size', default=4)", "main.py -b 64", "main.py -b {micro_batch_size}"),
        ("p.add_argument('-b', '--batch-size', default=4)", "main.py -B 9 -b 8", "main.py -B 9 -b {micro_batch_size}"),
        ("p.add_argument('--batch-size', '-b', default=4)", "main.py -b=64 -n 8", "main.py -b={micro_batch_size} -n 8"),
        ("@click.option('--bsz', default=4)\ndef main(bsz): ...", "main.py", "main.py --bsz {micro_batch_size}"),
        ("from options import parser", "main.py", "main.py --batch_size {micro_batch_size}"),
        ("p.add_argument('--batch-size', default=4)", "main.py --batch-size auto", "main.py --batch-size auto"),
        ("p.add_argument('--test-batch-size', default=4)", "main.py", "main.py"),
        ("p.add_argument('--batch-size', default=4", "main.py", "main.py"),
    ],
)
def test_an_option_that_the_script_declares_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, command: str, placed: str
) -> None:
    """Where the command leaves it out: what to type is more than that something is missing."""
    monkeypatch.chdir(tmp_path)
    Path("main.py").write_text(script)
    Path("options.py").write_text("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--batch_size', default=8)\n")

    assert variables_in(command.split()) == placed.split()


@pytest.mark.parametrize(
    ("command", "placed"),
    [
        ("train.py --batch-size 8 --lr 1", "train.py --batch-size {micro_batch_size} --lr 1"),
        ("train.py --batch_size=8", "train.py --batch_size={micro_batch_size}"),
        (
            "train.py --grad_accum_steps 4 --micro_batch_size 2",
            "train.py --grad_accum_steps {gradient_accumulation_steps} --micro_batch_size {micro_batch_size}",
        ),
        ("train.py --batch-size auto", "train.py --batch-size auto"),
        ("train.py 8", "train.py 8"),
    ],
)
def test_what_to_type_is_told_for_options_of_such_names(command: str, placed: str) -> None:
    """In place of the numbers."""
    assert variables_in(command.split()) == placed.split()


def test_a_file_that_is_no_configuration_is_told_with_why() -> None:
    """Where nothing was found, it may be what was meant."""
    problem = unreadable_in(["train.py", "--lr", "1e-3", "--opt", "commented.json", "broken.yaml"])

    assert problem is not None
    assert problem.message.startswith("commented.json:2: has a comment: JSON with comments is not edited")
    assert unreadable_in(["train.py", "flat.yml", "--lr", "1e-3"]) is None


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("train.py --config flet.yml", "flet.yml: there is no such file: did you mean flat.yml?"),
        ("train.py --opt conf/small.yaml", "conf/small.yaml: there is no such file: did you mean conf/smaller.yaml?"),
        ("python train.py no/such/folder.yaml --lr 1", "no/such/folder.yaml: there is no such file"),
        ("train.py --config=smaller.yaml", "smaller.yaml: there is no such file here, but conf/smaller.yaml"),
        ("train.py --log out.json --save-config all.yaml out.json", None),  # they may be written
        ("bash missing.sh", "missing.sh: there is no such file"),
        ("train.py --config nothing", None),  # no file's name
    ],
)
def test_a_configuration_that_is_not_there_is_told(command: str, problem: str | None) -> None:
    """With the file that may be meant: a program looks for some names in a folder of its own."""
    Path("conf").mkdir()
    Path("conf/smaller.yaml").write_text("loader: {batch_size: 8}\n")

    found = absent_in(command.split())

    assert (found.message if found else None) == problem


def test_where_a_file_below_holds_the_batch_is_told() -> None:
    """The program finds it there, and memplan is told so."""
    Path("conf").mkdir()
    Path("conf/smaller.yaml").write_text("loader: {batch_size: 8}\n")

    assert fields_of_files_below(["train.py", "--config", "smaller.yaml"]) == ["micro_batch_size=conf/smaller.yaml:loader.batch_size"]
    assert fields_of_files_below(["train.py", "--config", "flat.yml"]) == []


def test_a_number_at_the_top_of_the_script_is_found_by_its_name() -> None:
    """What is computed may come from the environment."""
    assert constant_of(["imports.py"], "BATCH_SIZE") == Path("hard_coded.py")
    assert constant_of(["computed.py"], "batch_size") is None
    assert constant_of(["hard_coded.py"], "SIZE") is None


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("python hard_coded.py", ["micro_batch_size=hard_coded.py:BATCH_SIZE"]),
        ("python imports.py", ["micro_batch_size=hard_coded.py:BATCH_SIZE"]),
        ("torchrun two_sizes.py", []),
        ("bash start.sh", ["micro_batch_size=start.sh:BATCH_SIZE", "gradient_accumulation_steps=start.sh:grad-accum-steps"]),
        ("python trainer.py", ["micro_batch_size=trainer.py:config.C.batch_size"]),
        ("python divided.py", ["micro_batch_size=divided.py:batch_size"]),
        ("python text.py", []),
        ("python missing.py", []),
        ("python library.py", ["micro_batch_size=library.py:Loader.__init__.self.batch_size"]),
        ("python uses_library.py", []),  # it may make none
        ("python never.py", ["micro_batch_size=never.py:BATCH_SIZE"]),  # where 0 is not to accumulate
    ],
)
def test_a_size_that_the_script_itself_holds_is_told(command: str, fields: list[str]) -> None:
    """Or a file that it imports; nobody but the user decides that it is written there."""
    assert fields_of_sources(command.split()) == fields
