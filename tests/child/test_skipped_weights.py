"""Pretrained models without their weights: the steps take the same memory, to the byte, whether these are read, skipped, or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.errors import NothingSeenError
from memplan.execution.findings import MISSING_WEIGHTS
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

pytest.importorskip("transformers")

MAKES = """
import sys, torch, transformers
torch.manual_seed(0)
folder, kind, shard_size = sys.argv[1:]
if kind == "llama":
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True)).to(torch.bfloat16)
else:
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
is_pickled = shard_size == "pickled"
model.save_pretrained(folder, max_shard_size="1GB" if is_pickled else shard_size, safe_serialization=not is_pickled)
"""

TRAINS = """
import sys, torch, transformers
kind, name, options = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(name, **eval(options)).to("cuda").train()
assert model.config._name_or_path == name
update = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ids = torch.randint(0, 1000, (4, 32), device="cuda")
    labels = torch.zeros(4, dtype=torch.long, device="cuda") if "Classification" in kind else ids
    model(input_ids=ids, labels=labels).loss.backward()
    update.step()
    update.zero_grad()
"""

Train = Callable[..., Rehearsal]


@pytest.fixture
def train(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Rehearse two steps of a model of that class and name, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "train.py").write_text(TRAINS)

    def run(kind: str, name: str, options: str = "{}", *, skip_weights: bool = True, said: Path | None = None) -> Rehearsal:
        return rehearse_script(
            ["train.py", kind, name, options], gpu=find_gpu("a100-80"), skip_weights=skip_weights, timeout_seconds=200, said=said
        )

    return run


def make(folder: Path, kind: str, shard_size: str = "1GB") -> None:
    """A checkpoint with random weights."""
    subprocess.run(
        [sys.executable, "-c", MAKES, str(folder), kind, shard_size],
        check=True,
        capture_output=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def peaks(rehearsal: Rehearsal) -> tuple[object, ...]:
    """What the steps took: allocated and reserved, of each step and in all."""
    assert rehearsal.failure is None
    return rehearsal.peak_allocated_bytes, rehearsal.peak_reserved_bytes, rehearsal.breakdown, rehearsal.steps


@pytest.mark.heavy
def test_the_steps_take_the_same_without_weights(train: Train, tmp_path: Path) -> None:
    """A head that the checkpoint lacks, on the GPU at once: weights that are read, and weights that are not there."""
    make(tmp_path / "model", "bert")
    arguments = ("AutoModelForSequenceClassification", "model", "{'num_labels': 5, 'device_map': 'cuda'}")

    read = train(*arguments, skip_weights=False)
    (tmp_path / "model" / "model.safetensors").unlink()
    absent = train(*arguments)

    assert peaks(read) == peaks(absent)
    assert [finding.kind for finding in read.findings if "weights" in finding.kind] == []
    (finding,) = (finding for finding in absent.findings if finding.kind == "skipped_weights")
    assert "(model)" in finding.message
    assert "transformers and diffusers load them as from files of 5 GB" in finding.message


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shard_size", "kind", "options"),
    [
        ("1GB", "LlamaForCausalLM", "{}"),
        ("1GB", "AutoModelForCausalLM", "{'dtype': 'auto', 'device_map': {'': 0}}"),
        ("300KB", "AutoModelForCausalLM", "{'dtype': 'float16', 'device_map': 'auto'}"),
        ("pickled", "AutoModelForCausalLM", "{'device_map': 'cuda'}"),
        ("pickled", "AutoModelForSequenceClassification", "{'dtype': 'auto', 'pad_token_id': 0}"),
    ],
)
def test_types_places_and_shards_are_those_asked_for(train: Train, tmp_path: Path, shard_size: str, kind: str, options: str) -> None:
    """One file or many, safetensors or pickled, on the host or on the GPU, in another type than stored."""
    make(tmp_path / "model", "llama", shard_size)

    assert peaks(train(kind, "model", options, skip_weights=False)) == peaks(train(kind, "model", options))


@pytest.mark.heavy
def test_a_model_of_eight_billion_parameters_needs_neither_disk_nor_memory(torch_build: TorchBuild, train: Train, tmp_path: Path) -> None:
    """By its name alone: of the 15 GiB of its weights, the host sees nothing."""
    (tmp_path / "train.py").write_text(
        "import resource, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-8B', dtype='auto').to('cuda')\n"
        "model(input_ids=torch.zeros(1, 16, dtype=torch.long, device='cuda')).logits.sum().backward()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    said = tmp_path / "said"

    found = train("", "", said=said)

    assert found.breakdown.parameters_bytes == pytest.approx(8_030_261_248 * 2, rel=0.001)
    assert int(said.read_text().split()[-1]) < 2 * 2**30


@pytest.mark.heavy
def test_a_program_that_lacks_weights_is_told_of_the_option(train: Train) -> None:
    """By default nothing is skipped: its own error stands, and the hint names what would build the model."""
    with pytest.raises(NothingSeenError) as refused:
        train("AutoModelForCausalLM", "openai-community/gpt2", skip_weights=False)

    assert refused.value.hint == MISSING_WEIGHTS


@pytest.mark.heavy
@pytest.mark.parametrize(("calls", "hint"), [("torch.hub.load_state_dict_from_url", MISSING_WEIGHTS), ("urllib.request.urlopen", None)])
def test_a_program_without_a_network_for_its_weights_is_told_of_the_option(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str, hint: str | None
) -> None:
    """The error of the connection names no weights: by whom it was made tells. That of anything else has its own hint."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(f"import urllib.request, torch\n{calls}('http://127.0.0.1:9/resnet-1234')\n")

    with pytest.raises(NothingSeenError) as refused:
        train("", "", skip_weights=False)

    assert refused.value.hint == (hint or "it failed before that: see what it said")


@pytest.mark.heavy
def test_what_is_not_known_is_the_programs_own_error(train: Train, tmp_path: Path) -> None:
    """A model that neither this machine nor the catalogue has. What was asked for already is not advised."""
    said = tmp_path / "said"

    with pytest.raises(NothingSeenError) as refused:
        train("AutoModelForCausalLM", "nobody/knows-this", said=said)

    assert refused.value.hint != MISSING_WEIGHTS
    assert "OSError: We couldn't connect to 'https://huggingface.co'" in said.read_text()


PACKAGES = ("torchvision==0.28.0", "timm==1.0.31", "diffusers==0.35.2", "importlib-metadata", "zipp", "peft==0.21.2")
PACKAGES_OF_SENTENCES = ("sentence-transformers==5.1.2", "scikit-learn", "scipy", "joblib", "threadpoolctl", "narwhals")

OTHERS = """
import sys, torch, transformers
what, makes = sys.argv[1], len(sys.argv) > 2
ids = {"input_ids": torch.zeros(4, 32, dtype=torch.long), "attention_mask": torch.ones(4, 32, dtype=torch.long)}
if what == "diffusers":
    from diffusers import UNet2DModel
    blocks = dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8)
    make = lambda: UNet2DModel(sample_size=32, block_out_channels=(64, 128), **blocks).save_pretrained("model/unet")
    load = lambda: UNet2DModel.from_pretrained("model", subfolder="unet", torch_dtype=torch.float16)
    step = lambda model: model(torch.randn(2, 3, 32, 32, device="cuda", dtype=torch.float16), 5).sample
elif what == "timm":
    import timm
    make = lambda: None
    load = lambda: timm.create_model("resnet18", pretrained="MEMPLAN_SKIP_WEIGHTS" in __import__("os").environ, num_classes=7)
    step = lambda model: model(torch.randn(4, 3, 64, 64, device="cuda"))
else:
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000)
    base = lambda: transformers.BertModel(transformers.BertConfig(**sizes))
    if what == "peft":
        import peft
        asked = peft.LoraConfig(r=8, target_modules=["query"])
        make = lambda: (base().save_pretrained("base"), peft.get_peft_model(base(), asked).save_pretrained("model"))
        load = lambda: peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained("base"), "model", is_trainable=True)
        step = lambda model: model(**{name: value.cuda() for name, value in ids.items()}).last_hidden_state
    else:
        from sentence_transformers import SentenceTransformer, models
        def make():
            open("vocab.txt", "w").write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]))
            transformers.BertTokenizerFast("vocab.txt").save_pretrained("base")
            base().save_pretrained("base")
            SentenceTransformer(modules=[models.Transformer("base"), models.Pooling(128)]).save("model")
        load = lambda: SentenceTransformer("model", device="cuda")
        step = lambda model: model({name: value.cuda() for name, value in ids.items()})["sentence_embedding"]
if makes:
    make()
    sys.exit()
model = load().cuda().train()
update = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
for _ in range(2):
    step(model).float().square().mean().backward()
    update.step()
    update.zero_grad()
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other packages, beside those of this environment; the test is skipped where there is no index to have them from."""
    folder = tmp_path_factory.mktemp("packages")
    wanted = [*PACKAGES, *PACKAGES_OF_SENTENCES]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        pytest.skip(f"packages cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("what", ["diffusers", "timm", "peft", "sentence_transformers"])
def test_models_of_other_packages_take_the_same(
    train: Train, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Weights that are read, skipped, and not there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "train.py").write_text(OTHERS)
    subprocess.run(
        [sys.executable, "train.py", what, "make"], check=True, capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )

    def run(*, skip_weights: bool) -> tuple[object, ...]:
        return peaks(rehearse_script(["train.py", what], gpu=find_gpu("t4"), skip_weights=skip_weights, timeout_seconds=200))

    read, skipped = run(skip_weights=False), run(skip_weights=True)
    for file in tmp_path.glob("model/**/*.safetensors"):
        file.unlink()

    assert read == skipped == run(skip_weights=True)
