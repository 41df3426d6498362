"""`memplan doctor` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, content

DOCTOR = Path(__file__).parents[1] / "trees" / "doctor"

UNTIDY = {
    "precision",
    "clip-before-unscale",
    "evaluation-with-gradient",
    "empty-cache",
    "set-to-none",
    "dropped-accumulation",
    "batch-size-overridden",
    "item-in-loop",
    "non-blocking-unpinned",
}


RANKS = """\
import os, torch, torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(4):
    loss = model(torch.zeros(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()  # empty-cache
    if dist.get_rank() == 0:
        print(loss.item())  # item-in-loop
"""
"""A training of every rank."""


def findings(run_memplan: Run, script: str, *options: str) -> Mapping[str, Any]:
    """What is found of a program of the tree, as JSON."""
    words = ["--gpu", "a100-80", "--steps", "0", "--field", "micro_batch_size=config.yaml:data.batch_size", "--format", "json"]
    done = run_memplan("doctor", *words, *options, "--", script, "config.yaml", cwd=DOCTOR)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == int(bool(answer["findings"])), done.stderr
    return answer


@pytest.mark.heavy
@pytest.mark.usefixtures("torch_build")
def test_an_untidy_program_is_told_line_by_line(run_memplan: Run) -> None:
    """Each line that a comment marks, and no other; the same training without them is silent."""
    found = findings(run_memplan, "untidy.py", "--no-effects")
    tidy = findings(run_memplan, "tidy.py", "--no-effects")

    lines = (DOCTOR / "untidy.py").read_text(encoding="utf-8").splitlines()
    marked = {(line.rpartition("  # ")[2], number) for number, line in enumerate(lines, start=1) if "  # " in line}
    told = {
        (one["check"], int(one["place"].rpartition(":")[2])) for one in found["findings"] if one["place"] and "untidy.py" in one["place"]
    }
    assert {one["check"] for one in found["findings"]} == UNTIDY
    assert told == {(check, number) for check, number in marked if check != "batch-size-overridden"}
    (batch,) = [one for one in found["findings"] if one["check"] == "batch-size-overridden"]
    assert batch["evidence"].startswith("`data.batch_size` is 32, and the DataLoader at ")
    assert batch["evidence"].endswith("gave batches of 16")
    assert batch["place"].endswith("config.yaml:2")
    assert (tidy["findings"], tidy["num_steps"]) == ([], 6)


@pytest.mark.heavy
@pytest.mark.usefixtures("torch_build")
@pytest.mark.parametrize("launcher", [("--num-gpus", "2", "--"), ("--", "torchrun", "--nproc-per-node", "2")])
def test_a_program_of_several_gpus_is_told_by_one_of_its_ranks(run_memplan: Run, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """With the lines of that rank: rank 0 reads the loss, and each rank empties the cache."""
    (tmp_path / "ranks.py").write_text(RANKS, encoding="utf-8")

    done = run_memplan("doctor", "--gpu", "a100-80", "--no-effects", "--format", "json", *launcher, "ranks.py", cwd=tmp_path)

    answer = json.loads(done.stdout)
    lines = RANKS.splitlines()
    told = {one["check"]: lines[int(one["place"].rpartition(":")[2]) - 1].rpartition("  # ")[2] for one in answer["findings"]}
    assert told == {name: name for name in ("empty-cache", "item-in-loop")}
    assert answer["num_steps"] == 4
    assert answer["notes"] == ["findings are of rank 0 of 2; ranks that do the same have the same ones"]


def test_a_finding_of_a_configuration_is_shown_written_and_undone(run_memplan: Run, tree: Path) -> None:
    """--dry-run writes nothing; after --apply the finding is gone; undo puts it back."""
    words = ("doctor", "--gpu", "rtx4090", "--config-path", tree, "--method", "analytic")
    before = content(tree)
    shown = run_memplan(*words, "--dry-run")
    same = content(tree)
    written = run_memplan(*words, "--apply")
    again = run_memplan(*words, "--format", "json")
    run_memplan("undo", tree)

    assert (shown.returncode, written.returncode, again.returncode) == (1, 1, 1)
    assert '-    precision: "16-mixed"\n+    precision: "bf16-mixed"' in shown.stdout
    assert same == before
    assert "wrote " in written.stderr
    assert [one["check"] for one in json.loads(again.stdout)["findings"]] == ["checkpointing-without-effect"]
    assert content(tree).items() >= before.items()


def test_a_linter_that_only_tells_exits_with_zero(run_memplan: Run, tree: Path) -> None:
    """As other linters have it."""
    done = run_memplan("doctor", "--gpu", "rtx4090", "--config-path", tree, "--method", "analytic", "--exit-zero")

    assert done.returncode == 0
    assert done.stdout.startswith("2 findings: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "t4", "--apply", "--dry-run", "--config-path", "conf"), "--apply writes, and --dry-run does not"),
        (("--gpu", "t4"), "this folder has no configuration"),
        (("--gpu", "t4", "nothing.py:build"), "nothing.py"),
        (("--auto", "train.py:build"), "no NVIDIA driver answers"),
    ],
)
def test_what_cannot_be_is_one_clear_line(run_memplan: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """No traceback, nothing found."""
    done = run_memplan("doctor", *words, cwd=tmp_path)

    assert done.returncode in (2, 3)
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr.splitlines()[0]
    assert done.stdout == ""
