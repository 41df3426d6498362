"""Numbers that are drawn again until all lie between two bounds."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from memplan.child.redraws import num_redraws
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MIB = 2**20
DRAWS_AGAIN = ".any()" in inspect.getsource(torch.nn.init._no_grad_trunc_normal_)  # type: ignore[attr-defined]

PROGRAM = """
import torch

weight = torch.empty(4096, 4096, device="cuda")
torch.nn.init.trunc_normal_(weight, std=1.0, a=-{bound}, b={bound})
print(torch.cuda.max_memory_allocated() // 2**20, "MiB")
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.randint(0, 5, (8, 8)).cuda()
    model(ids[ids.sum(1) > 0].float()).sum().backward()
    optimizer.step()
"""
"""64 MiB of weights; then a training of which values have to be found."""


@pytest.mark.parametrize(
    ("count", "bound", "expected"),
    [
        (4096 * 4096, 2.0, 2),  # 4.6% of all lie beyond two deviations
        (4096 * 4096, 4.5, 1),  # 114 numbers, and then hardly any
        (4096 * 4096, 100.0, 0),
        (10, 2.0, 0),
        (100, 2.0, 1),
    ],
)
def test_numbers_are_drawn_again_until_none_is_expected_outside(count: int, bound: float, expected: int) -> None:
    """Each time that share of those which were."""
    assert num_redraws(count, 0.0, 1.0, -bound, bound) == expected


@pytest.mark.skipif(not DRAWS_AGAIN, reason="this PyTorch draws once")
@pytest.mark.parametrize(
    ("bound", "at_peak"),
    [
        (2.0, 4 * 64 + 16),  # the weight, what was drawn before, now, and both together; and the mask
        pytest.param(100.0, 64 + 3 * 16, marks=pytest.mark.heavy),  # the weight, and the masks of one bound, of the other, and of both
    ],
)
def test_a_model_that_is_initialized_on_the_gpu_takes_what_redraws_take(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bound: float, at_peak: int
) -> None:
    """And nobody is asked whether there are any, in no run: the program has a verdict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM.replace("{bound}", str(bound)))

    found = rehearse_script(["train.py"], gpu=find_gpu("t4"), timeout_seconds=200)

    assert (found.verdict, found.lower_bound_reasons) == ("fits", ())
    assert [Path(read.place).name for read in found.reads] == ["train.py:11"]
    assert f"{at_peak} MiB" in capfd.readouterr().out
