"""Steps of workloads: what decides them, and what is known not to run before any process begins."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.errors import NotRehearsedError
from memplan.estimators.workload_steps import check_packages, step_of
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.contrastive import Contrastive
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from tests.child.models.test_together import HAS_DEEPSPEED
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

pytestmark = pytest.mark.usefixtures("torch_build")


def shared(**parallelism: Any) -> Workload:
    """A model by counts, on several GPUs."""
    model = {"kind": "parameters", "num_parameters": 1000, "activation_bytes_per_sample": 1000}
    return Workload.model_validate({"model": model, "parallelism": parallelism})


def family(gpu: GpuSpec, **parallelism: Any) -> str:
    return step_of(shared(**parallelism), gpu, None).family


def test_how_many_ranks_there_are_and_how_they_share_decides_a_step(torch_build: TorchBuild, a100: GpuSpec) -> None:
    """One rank shares with nobody, however it would."""
    assert family(a100, strategy="fsdp") == family(a100)
    families = {family(a100, devices=devices, strategy=strategy) for devices in (2, 8) for strategy in ("ddp", "fsdp")}

    assert len(families) == 4
    assert family(a100) not in families


def test_how_gpus_reach_each_other_decides_the_step_of_several(torch_build: TorchBuild) -> None:
    """NCCL's buffers are others by NVLink and by PCIe; one GPU has none."""
    by_nvlink, by_pcie = find_gpu("a100-80"), find_gpu("a100-80").model_copy(update={"name": "NVIDIA A100 80GB PCIe"})

    assert family(by_nvlink) == family(by_pcie)
    assert family(by_nvlink, devices=8) != family(by_pcie, devices=8)


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
def test_zero_is_deepspeed_s(torch_build: TorchBuild, a100: GpuSpec) -> None:
    """Without it nothing is run; one rank needs none."""
    with pytest.raises(NotRehearsedError, match="the strategy zero2 is deepspeed's, which is not installed") as error:
        check_packages(step_of(shared(devices=8, strategy="zero2"), a100, None))
    check_packages(step_of(shared(strategy="zero2"), a100, None))

    assert error.value.hint == "`pip install deepspeed`"


def test_a_machine_of_more_gpus_than_are_simulated_is_refused(torch_build: TorchBuild, a100: GpuSpec) -> None:
    """Formulas go on."""
    with pytest.raises(NotRehearsedError, match="a machine has at most 64 GPUs here"):
        check_packages(step_of(shared(devices=65), a100, None))


DECODER = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 1001, "head": "language_model", "has_attention_mask": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parallelism", "model", "problem"),
    [
        ({"tensor_parallel_size": 2}, {"kind": "parameters", "num_parameters": 10}, "only a language model without adapters is split"),
        ({"tensor_parallel_size": 2}, {"lora": {"rank": 8}}, "only a language model without adapters is split"),
        ({"tensor_parallel_size": 2}, {}, "with data parallelism needs shards: DistributedDataParallel takes no split parameters"),
        ({"tensor_parallel_size": 8}, {}, "tensor_parallel_size: num_key_value_heads is 4, which 8 does not divide"),
        ({"tensor_parallel_size": 2, "strategy": "fsdp"}, {}, "vocab_size is 1001, which 2 does not divide"),
        ({"context_parallel_size": 2}, {"has_attention_mask": True}, "for causal attention without a mask of padding"),
        ({"context_parallel_size": 2}, {"attention": "eager"}, "for causal attention without a mask of padding"),
        ({"context_parallel_size": 8}, {}, "sequence_length is 24, which 16 does not divide"),
        ({"pipeline_parallel_size": 8}, {}, "num_layers is 4, which 8 does not divide"),
        ({"pipeline_parallel_size": 2}, {"has_attention_mask": True}, "hidden states alone, without a mask of padding"),
    ],
)
def test_what_cannot_be_split_is_said_before_anything_is_run(
    torch_build: TorchBuild, a100: GpuSpec, parallelism: dict[str, Any], model: dict[str, Any], problem: str
) -> None:
    """With the field whose value does not go with it."""
    described = model | {"activation_bytes_per_sample": 1} if "kind" in model else DECODER | model
    workload = Workload.model_validate(
        {"model": described, "parallelism": {"devices": 8} | parallelism, "training": {"sequence_length": 24}}
    )

    with pytest.raises(NotRehearsedError, match=problem) as error:
        check_packages(step_of(workload, a100, None))

    assert error.value.hint


def test_all_micro_batches_of_a_pipeline_decide_its_step(torch_build: TorchBuild, a100: GpuSpec) -> None:
    """Its stages hold several at once; else two tell of all."""

    def micro_batches(stages: int) -> int:
        described = {"model": DECODER, "parallelism": {"devices": 4, "pipeline_parallel_size": stages}}
        workload = Workload.model_validate(described | {"training": {"gradient_accumulation_steps": 16}})
        return step_of(workload, a100, None).program.training.gradient_accumulation_steps

    assert (micro_batches(1), micro_batches(4)) == (2, 16)


@pytest.mark.parametrize(("sampling", "is_one"), [("pair", True), ("group", False), ("per_positive", False)])
def test_positives_that_no_step_encodes_make_no_other_step(a100: GpuSpec, sampling: str, *, is_one: bool) -> None:
    """Of pairs each row has one positive, however many an anchor has in an epoch."""
    workload = shared().model_copy(update={"contrastive": Contrastive(sampling=sampling)})
    few, many = (step_of(workload, a100, Stage(name="01", n_positives=count, n_negatives=4)) for count in (1, 8))

    assert (few.family == many.family) is is_one
