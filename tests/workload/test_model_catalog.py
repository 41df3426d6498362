"""Models by name: what answers to a name, in which order, and that the catalogue's sizes are the published ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.estimators.analytic.parameters import count, parameter_groups
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.model import TransformerModel
from memplan.workload.model_catalog import find_model
from memplan.workload.published_models import CATALOG, CatalogModel, cached_config, catalog_models

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, whatever this machine has."""
    cache = tmp_path / "hub-cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def write_config(folder: Path, **values: Any) -> Path:
    """A config.json in *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **values}))
    return path


def counts_of(published: str) -> range:
    """The numbers of parameters that round to what is published: "7B" is 6.5 to 7.5 billion, "410M" 405 to 415 million."""
    if published.isdigit():
        return range(int(published), int(published) + 1)
    number, unit = Decimal(published[:-1]), UNITS[published[-1]]
    digits = published[:-1]
    step = Decimal(10) ** (-len(digits.partition(".")[2]) if "." in digits else len(digits) - len(digits.rstrip("0")))
    return range(int((number - step / 2) * unit), int((number + step / 2) * unit) + 1)


def transformer_of(entry: CatalogModel) -> TransformerModel | None:
    """The published class of *entry* as memplan's own formulas describe it; None for one that they cannot."""
    fields = model_from_config(ConfigJson(entry.config | {"architectures": [entry.counted_class]}, CATALOG))
    return TransformerModel.model_validate(fields) if fields["kind"] == "transformer" else None


BY_FORMULAS = [entry for entry in catalog_models() if transformer_of(entry) is not None]


@pytest.mark.parametrize(("published", "least", "most"), [("7B", 6.5e9, 7.5e9), ("410M", 405e6, 415e6), ("86.57M", 86.565e6, 86.575e6)])
def test_a_rounded_count_is_as_exact_as_it_is_written(published: str, least: float, most: float) -> None:
    """Half a unit of the last digit, either way."""
    assert (counts_of(published)[0], counts_of(published)[-1]) == (least, most)


@pytest.mark.parametrize("entry", BY_FORMULAS, ids=lambda entry: entry.names[0])
def test_formulas_count_the_published_parameters(entry: CatalogModel) -> None:
    """To the last one where an exact count is published."""
    model = transformer_of(entry)
    assert model is not None

    assert count(parameter_groups(model)) in counts_of(entry.published)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' DeBERTa and ModernBERT
@pytest.mark.parametrize("entry", catalog_models(), ids=lambda entry: entry.names[0])
def test_transformers_builds_the_published_parameters(entry: CatalogModel) -> None:
    """Of every entry, on the meta device; and the formulas count the same."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = {key: value for key, value in entry.config.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(entry.config["model_type"], **settings)

    with torch.device("meta"):
        model = getattr(transformers, entry.counted_class)._from_config(config)
    model.tie_weights()

    built = sum(parameter.numel() for parameter in model.parameters())
    described = transformer_of(entry)
    assert built in counts_of(entry.published)
    assert described is None or count(parameter_groups(described)) == built


def test_the_catalogue_names_its_sources_and_each_model_once() -> None:
    """A source for the configuration and one for the count, and none that nobody uses."""
    content = json.loads(CATALOG.read_text(encoding="utf-8"))
    used = {source for entry in content["models"] for source in (entry["source"], entry["parameters"]["source"])}
    names = [name.lower() for entry in catalog_models() for name in entry.names]

    assert used == set(content["sources"])
    assert len(names) == len(set(names))
    assert len(catalog_models()) >= 120


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b", "Llama-3.1-8B", "unsloth/Meta-Llama-3.1-8B-Instruct"]
)
def test_a_published_model_is_found_by_its_names(name: str) -> None:
    """Without regard to case, without its organisation where that is clear, and by its mirrors."""
    found = find_model(name, folders=[])

    assert found.config.values["vocab_size"] == 128256
    assert (found.name, found.origin, found.file) == (name, "memplan's catalogue (meta-llama/Llama-3.1-8B)", None)


def test_a_local_folder_comes_before_the_catalogue(tmp_path: Path) -> None:
    """As the name is written, relative to the folders in their order; a folder without a config.json is none."""
    (tmp_path / "first" / "gpt2").mkdir(parents=True)
    local = write_config(tmp_path / "second" / "gpt2", hidden_size=64)

    found = find_model("gpt2", folders=[tmp_path / "first", tmp_path / "second"])
    by_file = find_model("gpt2/config.json", folders=[tmp_path / "second"])

    assert (found.file, found.config.integer("hidden_size", 0)) == (local, 64)
    assert by_file.file == find_model(str(local), folders=[tmp_path]).file == local
    assert find_model("gpt2", folders=[tmp_path / "first"]).file is None


def test_the_cache_of_the_hub_comes_before_the_catalogue(no_hub_cache: Path) -> None:
    """The snapshot that `main` names; else the newest that has a config.json."""
    snapshots = no_hub_cache / "models--gpt2" / "snapshots"
    named = write_config(snapshots / "aaa", hidden_size=1)
    newer = write_config(snapshots / "bbb", hidden_size=2)
    os.utime(snapshots / "aaa", (1, 1))

    assert find_model("gpt2", folders=[]).file == newer
    (no_hub_cache / "models--gpt2" / "refs").mkdir()
    (no_hub_cache / "models--gpt2" / "refs" / "main").write_text("aaa")
    assert find_model("gpt2", folders=[]).file == named


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"HF_HUB_CACHE": "{home}/a", "HF_HOME": "{home}/b"}, "a"),
        ({"HF_HOME": "{home}/b"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{home}/c"}, "c/huggingface/hub"),
        ({}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], where: str
) -> None:
    """By the same variables, in the same order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "{home}"} | environment).items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    config = write_config(tmp_path / where / "models--org--model" / "snapshots" / "abc")

    assert cached_config("org/model") == config


@pytest.mark.parametrize(
    "name", ["../Qwen2.5-7B-Instruct", "/data/models/Qwen2.5-7B-Instruct/", "~/qwen2.5-7b-instruct", "a/b/Qwen2.5-7B-Instruct"]
)
def test_a_folder_of_another_machine_is_the_published_model_of_its_name(tmp_path: Path, name: str) -> None:
    """It is told that the folder is not here."""
    found = find_model(name, folders=[tmp_path])

    assert found.config.values == find_model("Qwen/Qwen2.5-7B-Instruct", folders=[tmp_path]).config.values
    assert found.origin.endswith("(Qwen/Qwen2.5-7B), by the last part of its path: there is no such folder here")


def test_a_name_of_the_hub_is_not_looked_up_by_its_last_part(tmp_path: Path) -> None:
    """Somebody's model of that name may be another one."""
    with pytest.raises(ConfigError, match=r"unknown model: 'somebody/Qwen2\.5-7B-Instruct'"):
        find_model("somebody/Qwen2.5-7B-Instruct", folders=[tmp_path])


def test_an_unknown_model_is_told_with_what_comes_near_and_what_to_type() -> None:
    """Near names, and a config.json of one's own."""
    with pytest.raises(ConfigError) as refused:
        find_model("meta-llama/Llama-3.1-9B", folders=[])

    assert refused.value.message == "unknown model: 'meta-llama/Llama-3.1-9B'"
    assert refused.value.hint is not None
    assert "did you mean meta-llama/Llama-3.1-8B" in refused.value.hint
    assert "source=" in refused.value.hint


@pytest.mark.parametrize("name", ["", "/", "no such model at all", "../..", "a/b/c/d", "é" * 300])
def test_a_name_of_nothing_is_told_so(tmp_path: Path, name: str) -> None:
    """Never a traceback."""
    with pytest.raises(ConfigError, match="unknown model"):
        find_model(name, folders=[tmp_path])


def test_the_catalogue_is_read_when_it_is_asked(tmp_path: Path) -> None:
    """Importing it reads no data, and needs neither pydantic nor YAML."""
    script = (
        "import sys, memplan.workload.model_catalog, memplan.workload.published_models as catalog;"
        "assert not {'pydantic', 'ruamel'} & set(sys.modules), sys.modules;"
        "assert catalog.catalog_models.cache_info().currsize == 0"
    )

    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
