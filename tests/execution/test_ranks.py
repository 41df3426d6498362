"""How many GPUs train together: as a launcher is told, and which rank is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.execution.ranks import ONE_RANK, Ranks, launched_by
from memplan.programs.run_script import launcher_words


@pytest.mark.parametrize(
    ("command", "num_gpus", "num_nodes"),
    [
        ("torchrun --nproc-per-node 8 train.py", 8, 1),
        ("torchrun --nproc_per_node=4 --nnodes=1:2 train.py --nnodes 7", 4, 2),
        ("torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d -m my.training", 8, 16),
        ("/opt/bin/torchrun --nproc-per-node=gpu train.py", 1, 1),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", 2, 1),
        ("accelerate launch --num_processes 16 --num_machines 2 train.py", 8, 2),
        ("accelerate launch train.py --num_processes 4", 1, 1),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", 4, 1),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config c", 2, 1),
        ("train.py --num_gpus 8", 1, 1),
        ("python train.py --num-nodes 2", 1, 1),
    ],
)
def test_a_launcher_says_how_many_train_together(command: str, num_gpus: int, num_nodes: int) -> None:
    """In front of the script; what comes behind it is the script's own."""
    assert launched_by(command.split()) == Ranks(num_gpus, num_nodes)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("accelerate launch --config_file {} train.py", Ranks(4, 2)),
        ("accelerate launch --config_file={} --num_machines 1 train.py", Ranks(8, 1)),
        ("accelerate launch train.py", Ranks(2, 1)),
    ],
)
def test_accelerate_is_told_in_a_file(command: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is named, else the user's own; options go before it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n", encoding="utf-8")
    named = tmp_path / "fsdp.yaml"
    named.write_text("num_machines: 2\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n", encoding="utf-8")

    assert launched_by(command.format(named).split()) == ranks


def test_ranks_are_counted_over_all_machines() -> None:
    """Rank 9 of 16 is on the second machine of two with eight GPUs."""
    ranks = Ranks(8, 2, 9).checked()

    assert (ranks.size, ranks.variables()["MEMPLAN_WORLD"]) == (16, "8 2 9")
    assert ONE_RANK.variables() == {}
    assert Ranks(is_asked=True).variables()["MEMPLAN_WORLD"] == "1 1 0"


@pytest.mark.parametrize(
    ("ranks", "problem", "hint"),
    [(Ranks(8, 2, 16), "no rank 16 of 16", "0 to 15"), (Ranks(128), "at most 64 GPUs", "num_nodes=8")],
)
def test_there_is_no_such_rank(ranks: Ranks, problem: str, hint: str) -> None:
    """The error says which there are."""
    with pytest.raises(UsageError, match=problem) as found:
        ranks.checked()

    assert hint in (found.value.hint or "")


@pytest.mark.parametrize(
    ("script", "num_gpus", "num_nodes"),
    [
        ("python prepare.py\ntorchrun --nproc_per_node 8 --nnodes=2 \\\n  train.py --x 1\n", 8, 2),
        ("GPUS=4\n# torchrun --nproc_per_node 16\nexec torchrun --nproc_per_node=$GPUS train.py\n", 4, 1),
        ('N=${1:-2}\naccelerate launch --num_processes "$N" train.py\n', 2, 1),
        ("python train.py --num_gpus 8\n", 1, 1),
        ('GPUS=8\nDISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1"\ntorchrun $DISTRIBUTED_ARGS train.py\n', 8, 1),
        ("ARGS=( --nproc_per_node 4 )\ntorchrun ${ARGS[@]} train.py\n", 4, 1),
        ('LAUNCH="torchrun --nproc_per_node 4"\n$LAUNCH train.py\n', 4, 1),
        ('G=4\ntorchrun --nproc_per_node="$G" train.py\n', 4, 1),
        ("torchrun --nproc_per_node=${G:-4} train.py\n", 4, 1),
        ("torchrun --nproc_per_node 1 train.py; torchrun --nproc_per_node 8 evaluate.py\n", 1, 1),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) train.py\n", 1, 1),
        ("echo 'not closed\n", 1, 1),
    ],
)
def test_the_launcher_in_a_shell_script_says_it_too(script: str, num_gpus: int, num_nodes: int, tmp_path: Path) -> None:
    """Its variables are filled in, as far as the script sets them."""
    path = tmp_path / "start.sh"
    path.write_text(script)

    assert launched_by(launcher_words(["bash", str(path)])) == Ranks(num_gpus, num_nodes)
