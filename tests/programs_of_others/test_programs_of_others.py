"""
Training programs as people write them, rehearsed unchanged: each ends with a report whose bytes can be worked out.

Parameters, gradients and optimizer state follow from shapes and types, and in some programs the activations do as well. The programs lie in
`programs/`, make their own data, and are not run by pytest; those that need packages which are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

pytestmark = pytest.mark.heavy

PROGRAMS = Path(__file__).with_name("programs")
MIB = 2**20

BESIDE = 0.02
"""How far bytes may be from those worked out: the allocator rounds each tensor up to 512."""


class Program(NamedTuple):
    """One program, and what is known of it before it runs."""

    words: str
    """After the Python: the file in `programs/` and its arguments; another program begins with its own name."""
    parameters: int
    """Elements."""
    moments: int = 2
    """Of the optimizer, as many elements as the parameters have."""
    bytes_each: int = 4
    """Of a parameter, and of a moment."""
    needs: str = ""
    """The package that it needs."""
    beside: float = BESIDE

    @property
    def name(self) -> str:
        """Return the file."""
        return next(word for word in self.words.split() if word.endswith((".py", ".sh")))


def layers(*widths: int) -> int:
    """Elements of linear layers, with biases."""
    return sum(inner * outer + outer for inner, outer in pairwise(widths))


def norms(width: int, count: int) -> int:
    """Elements of layer norms or batch norms, weight and bias."""
    return 2 * width * count


def encoder(width: int, hidden: int) -> int:
    """Elements of nn.TransformerEncoderLayer."""
    return 3 * layers(width, width) + layers(width, width) + layers(width, hidden, width) + norms(width, 2)


GPT = 8192 * 384 + 256 * 384 + 6 * (layers(384, 3 * 384) + layers(384, 384) + layers(384, 1536, 384) + norms(384, 2)) + norms(384, 1)
WRITER = 4096 * 256 + 256 * 256 + 4 * (layers(256, 3 * 256) + layers(256, 256) + layers(256, 1024, 256) + norms(256, 2)) + norms(256, 1)
DISTRIBUTED = 8 * layers(1024, 1024) + layers(1024, 16)

FITTING = [
    Program("gpt_loop.py bf16", GPT),
    Program("gpt_loop.py fp16", GPT),
    Program("token_mask.py", 30_000 * 256 + encoder(256, 1024) + layers(256, 30_000)),
    Program("graph_edges.py", layers(256, 512) + layers(512, 7)),
    Program("neighbour_sampling.py", 2 * (layers(128, 256) + layers(256, 10)), beside=0.06),  # of four biases three take 512 bytes
    Program("switch_layer.py", 2 * (layers(512, 8) + 8 * layers(512, 2048, 512))),
    Program("masked_autoencoder.py", 196 * 384 + 192 + layers(768, 384, 192, 768) + 4 * encoder(384, 1536) + 2 * encoder(192, 768)),
    Program("ppo.py", layers(64, 512, 512) + layers(512, 6) + layers(512, 1), beside=0.03),
    Program("packed.py", 8000 * 256 + 512 * 256 + layers(256, 3 * 256) + layers(256, 256) + layers(256, 8000)),
    Program("hard_negatives.py", layers(512, 1024, 128)),
    Program("compiled.py", 2 * (norms(512, 1) + layers(512, 2048, 512))),
    Program("lightning_module.py out", layers(784, 1024, 1024, 10), needs="lightning"),
    Program("torchrun --standalone --nproc-per-node 1 distributed.py ddp", DISTRIBUTED),
    Program("torchrun --standalone --nproc-per-node 1 distributed.py fsdp", DISTRIBUTED),
    Program("accelerate launch --num_processes 1 accelerated.py", layers(512, 2048, 2048, 10), needs="accelerate"),
    Program("bash launch.sh", GPT),
]
"""Those of which parameters and optimizer state are known."""


def rehearse(program: Program, *, steps: int = 3) -> Rehearsal:
    """Rehearse *program* on an A100, in the working folder."""
    if program.needs and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    words = [str(PROGRAMS / word) if word == program.name else word for word in program.words.split()]
    return rehearse_script(words, gpu=find_gpu("a100-80"), steps=steps, timeout_seconds=200, output_to_stderr=True)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


@pytest.mark.parametrize("program", FITTING, ids=lambda program: program.words)
def test_a_program_fits_and_its_model_states_are_those_of_its_shapes(program: Program) -> None:
    """Parameters and optimizer state, by category, as shapes and types say; gradients at most as much as the parameters."""
    seen = rehearse(program)

    assert (seen.verdict, seen.exit_code, len(seen.steps)) == ("fits", 0, 3)
    parameters = program.parameters * program.bytes_each
    assert seen.breakdown.parameters_bytes == pytest.approx(parameters, rel=program.beside)
    at_peak = 0 if seen.peak_phase.endswith("step 1") and "optimizer" not in seen.peak_phase else program.moments
    assert seen.breakdown.optimizer_state_bytes == pytest.approx(at_peak * parameters, rel=program.beside)
    assert seen.breakdown.gradients_bytes <= parameters * (1 + program.beside)


def test_what_a_model_writes_is_as_long_as_it_may_be() -> None:
    """Of 8 texts with 112 tokens each, out of 4096: the logits, their logarithms, and the gradients of both, in fp32. Weights are saved."""
    seen = rehearse(Program("policy_gradient.py out", WRITER, needs="transformers"), steps=2)

    assert (seen.verdict, seen.exit_code) == ("fits", 0)
    assert seen.breakdown.parameters_bytes == pytest.approx(4 * WRITER, rel=BESIDE)
    assert seen.breakdown.activations_bytes >= 3 * 8 * 112 * 4096 * 4


def test_a_student_its_teacher_and_its_average_are_parameters() -> None:
    """The average as many bytes as the student, the teacher half of them; and the moments two for each parameter of the student alone."""
    elements = 4 * encoder(512, 2048)

    seen = rehearse(Program("averaged_student.py last.pt", elements))

    assert (seen.verdict, seen.exit_code, len(seen.steps)) == ("fits", 0, 3)
    assert [Path(file.path).name for file in seen.held_back_files] == ["last.pt"]
    assert seen.breakdown.parameters_bytes == pytest.approx(elements * (4 + 4 + 2), rel=BESIDE)
    assert seen.breakdown.optimizer_state_bytes == pytest.approx(elements * 8, rel=BESIDE)


OTHERS = [
    ("segmentation_unet.py", ""),
    ("detection_loss.py", ""),
    ("gan.py", ""),
    ("recommender.py", ""),
    ("speech_ctc.py", ""),
    ("style_lbfgs.py", ""),
    ("hf_classification.py out", "transformers"),
    ("hf_causal.py out 8", "transformers"),
    ("hf_seq2seq.py out", "transformers"),
]
"""Those of which the end is known: a report, whose sizes nobody guessed."""


@pytest.mark.parametrize(("words", "needs"), OTHERS, ids=[words for words, _ in OTHERS])
def test_a_program_ends_with_a_report_and_no_size_is_guessed(words: str, needs: str) -> None:
    """What the data say is known, and what the model says is told as an assumption."""
    seen = rehearse(Program(words, 0, needs=needs))

    assert (seen.verdict, seen.exit_code) == ("fits", 0)
    assert "zero" not in {read.basis for read in seen.reads}


def test_the_numbers_that_a_router_decides_are_told_as_assumed() -> None:
    """Mixtral's routing table is made by one_hot, from what the router chose."""
    routed = [read for read in rehearse(Program("mixtral.py", 0, needs="transformers"), steps=1).reads if "modeling_mixtral" in read.place]

    assert {read.basis for read in routed} == {"assumed"}
