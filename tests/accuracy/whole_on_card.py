"""
Whole programs on a GPU of this machine, and rehearsed unchanged: the recorded peaks of each, and what a rehearsal says.

The programs are those of `whole_programs/` and of `programs_of_others/`: users' programs with data of their own, whose masks, lengths,
boxes and edges decide what they allocate. A line of a recording is one program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FOLDERS = (HERE / "whole_programs", HERE.parent / "programs_of_others" / "programs")
RECORDER = HERE / "recorded_run.py"
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
SECONDS = 400


class WholeProgram(NamedTuple):
    """One program and what it is started with."""

    words: str
    """A file of one of the folders, and its arguments; `torchrun` before it."""
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """Return what tells it from the others."""
        return self.words + (" (expandable segments)" if self.environment else "")

    @property
    def is_here(self) -> bool:
        """Say whether the packages that it imports are installed."""
        text = next(Path(path_of(word)).read_text(encoding="utf-8") for word in self.words.split() if word.endswith(".py"))
        needed = {package for package in PACKAGES if f"import {package}" in text or f"from {package}" in text}
        return all(importlib.util.find_spec(package) is not None for package in needed)

    def command(self, *before: str) -> list[str]:
        """Return what starts it, with *before* in front of the file."""
        words = self.words.split()
        launcher = [sys.executable]
        if words[0] == "torchrun":
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            del words[0]
        return [*launcher, *before, *map(path_of, words)]


PACKAGES = ("accelerate", "lightning", "peft", "timm", "torch_geometric", "torchvision", "transformers")


def path_of(word: str) -> str:
    """Return the file of that name in one of the folders; *word* where there is none."""
    return next((str(folder / word) for folder in FOLDERS if (folder / word).is_file()), word)


PROGRAMS = [
    *(
        WholeProgram(words, {})
        for words in (
            "accelerated.py", "averaged_student.py last.pt", "captured.py", "compiled.py", "compiled_decoder.py default",
            "compiled_decoder.py reduce-overhead", "detection_loss.py", "detector.py fasterrcnn_resnet50_fpn",
            "detector.py maskrcnn_resnet50_fpn", "diffusion.py", "factorized.py", "gan.py", "gpt_loop.py bf16", "gpt_loop.py fp16",
            "graph_edges.py", "graph_network.py gat", "graph_network.py gcn", "graph_network.py sage", "hard_negatives.py",
            "hf_causal.py out 8", "hf_classification.py out", "hf_seq2seq.py out", "image_classifier.py convnext_tiny 64 float16",
            "image_classifier.py efficientnet_b0 64 bfloat16", "image_classifier.py resnet50 32 float32",
            "image_classifier.py resnet50 64 bfloat16", "image_classifier.py swin_tiny_patch4_window7_224 64 bfloat16",
            "image_classifier.py vit_base_patch16_224 64 bfloat16", "language_model.py 16 1 checkpoint", "language_model.py 8 1",
            "language_model.py 8 1 compile", "language_model.py 8 4 evaluate", "largest_batch.py", "lightning_module.py out", "lora.py",
            "masked_autoencoder.py", "masked_language_model.py", "mixtral.py", "neighbour_sampling.py",
            "networks.py convnextv2_nano 64 bfloat16", "networks.py deeplabv3_resnet50 12 bfloat16", "networks.py densenet121 48 float32",
            "networks.py efficientnetv2_rw_t 48 bfloat16 benchmark", "networks.py inception_v3 48 float32",
            "networks.py mobilenetv3_large_100 128 float16 channels_last", "networks.py r3d_18 12 float32",
            "networks.py regnety_016 64 float32 channels_last", "networks.py resnet18 256 float32 benchmark",
            "networks.py resnet50 64 bfloat16 channels_last benchmark", "networks.py resnext50_32x4d 64 bfloat16 channels_last",
            "networks.py sound 16 bfloat16", "networks.py sound 16 float32 benchmark", "networks.py vgg16_bn 48 bfloat16", "packed.py",
            "policy_gradient.py out", "ppo.py", "recommender.py", "segmentation_unet.py", "sequence_labels.py", "speech_ctc.py",
            "speech_encoder.py", "style_lbfgs.py", "switch_layer.py", "token_mask.py", "torchrun distributed.py ddp",
            "torchrun distributed.py fsdp",
        )
    ),
    *(
        WholeProgram(words, EXPANDABLE)
        for words in (
            "detector.py fasterrcnn_resnet50_fpn", "gpt_loop.py bf16", "hf_seq2seq.py out", "language_model.py 8 1",
            "masked_language_model.py",
        )
    ),
]  # fmt: skip


EQUAL = frozenset({
    "accelerated.py", "compiled.py", "factorized.py", "gan.py", "gpt_loop.py bf16", "gpt_loop.py bf16 (expandable segments)",
    "gpt_loop.py fp16",
    "graph_edges.py", "graph_network.py gat", "graph_network.py gcn", "graph_network.py sage", "hf_causal.py out 8",
    "hf_classification.py out", "hf_seq2seq.py out", "hf_seq2seq.py out (expandable segments)",
    "image_classifier.py convnext_tiny 64 float16", "image_classifier.py efficientnet_b0 64 bfloat16",
    "image_classifier.py resnet50 64 bfloat16",
    "image_classifier.py swin_tiny_patch4_window7_224 64 bfloat16", "image_classifier.py vit_base_patch16_224 64 bfloat16",
    "language_model.py 16 1 checkpoint", "language_model.py 8 1", "language_model.py 8 1 (expandable segments)",
    "language_model.py 8 1 compile", "language_model.py 8 4 evaluate", "largest_batch.py", "lightning_module.py out", "lora.py",
    "masked_autoencoder.py", "masked_language_model.py", "masked_language_model.py (expandable segments)", "mixtral.py",
    "neighbour_sampling.py", "networks.py convnextv2_nano 64 bfloat16", "networks.py mobilenetv3_large_100 128 float16 channels_last",
    "networks.py regnety_016 64 float32 channels_last", "networks.py resnext50_32x4d 64 bfloat16 channels_last", "packed.py",
    "policy_gradient.py out", "ppo.py", "recommender.py", "segmentation_unet.py", "speech_ctc.py", "token_mask.py",
    "torchrun distributed.py ddp", "torchrun distributed.py fsdp",
})  # fmt: skip
"""Of which a rehearsal with PyTorch 2.11 finds the peaks that were recorded, allocated and reserved, to the byte."""


def record_program(program: WholeProgram) -> dict[str, Any]:
    """Run *program* on this machine's GPU; return its peaks and what the driver holds beside them."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            program.command(str(RECORDER), folder),
            cwd=folder,
            env={**os.environ, **program.environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        peaks = Path(folder) / "peaks.json"
        if not peaks.exists():
            raise RuntimeError(f"{program.name}: {done.stderr[-400:]}")
        return {"program": program.name, **json.loads(peaks.read_text(encoding="utf-8"))}


def rehearse_program(program: WholeProgram, gpu: str) -> dict[str, Any]:
    """Return the JSON that `memplan rehearse` says of *program*, with this Python's packages."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "memplan",
                "rehearse",
                "--gpu",
                gpu,
                "--format",
                "json",
                "--timeout",
                str(SECONDS),
                "--",
                *program.command(),
            ],
            cwd=folder,
            env={**os.environ, **program.environment},
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout.strip():
        raise RuntimeError(f"{program.name}: {done.stderr[-400:]}")
    return dict(json.loads(done.stdout))
