"""What is told of what a program said."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.estimators.rehearse_program import error_in, last_lines

OWN = """\
Traceback (most recent call last):
  File "train.py", line 4, in <module>
    main()
KeyError: 'the data'
"""

# As torchrun of PyTorch 2.13 and `accelerate launch` 1.10 end, shortened.
TORCHRUN = (
    "W1126 23:13:14.303000 2377 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable\n",
    """\
E1126 23:13:18.469000 2377 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 2383)
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
""",
)
ACCELERATE = (
    "To avoid this warning run `accelerate config`.\n",
    """\
Traceback (most recent call last):
  File "/bin/accelerate", line 8, in <module>
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python3', 'train.py']' returned non-zero exit status 1.
""",
)


@pytest.mark.parametrize(("before", "after"), [TORCHRUN, ACCELERATE, ("", "")])
def test_the_error_of_a_rank_is_told_and_not_its_launcher_s(tmp_path: Path, before: str, after: str) -> None:
    """The launcher's is longer, and says nothing of it."""
    (tmp_path / "said").write_text(before + OWN + after)

    assert last_lines(tmp_path / "said").splitlines()[-4:] == [f"  {line}" for line in OWN.splitlines()]


def test_an_error_of_several_lines_is_told_by_its_first(tmp_path: Path) -> None:
    """The rest of it, as `torch.load` has, names nothing; what a program prints without a traceback is its last line."""
    said = tmp_path / "said"
    begin = 'Traceback (most recent call last):\n  File "a.py", line 1\n    load()\n'
    traceback = f"{begin}UnpicklingError: Weights only load failed.\n\nSee the docs.\n"
    again = f"{traceback}\nDuring handling of the above exception, another exception occurred:\n\n{begin}ValueError: neither\n"

    for text, named in (
        (traceback, "UnpicklingError: Weights only load failed."),
        (again, "ValueError: neither"),
        ("usage: train.py\ntrain.py: error: too few arguments\n", "train.py: error: too few arguments"),
        ("", ""),
    ):
        said.write_text(text)
        assert error_in(said).startswith(named)


def test_what_a_launcher_says_by_itself_is_told(tmp_path: Path) -> None:
    """Nobody else has said anything; and nothing is told of a program that is silent."""
    (tmp_path / "said").write_text("".join(TORCHRUN))

    assert "train.py FAILED" in last_lines(tmp_path / "said")
    assert last_lines(tmp_path / "nothing") == ""
