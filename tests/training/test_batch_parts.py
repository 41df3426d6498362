"""A batch is split whatever it is made of, and never changed."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from memplan.errors import UsageError
from memplan.training.batch_parts import batch_size_of, named_tensors, num_samples, part_of


class FrozenMapping(Mapping[str, Any]):
    """A mapping over an inner dict, as a user would write it; a shallow copy shares the dict."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class EditableMapping(FrozenMapping, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]


class KeywordMapping(EditableMapping):
    """Cannot be made from a dict alone."""

    def __init__(self, *, inner: dict[str, Any]) -> None:
        super().__init__(inner)


class DelegatingDict(dict):  # type: ignore[type-arg]
    """A dict whose own storage is empty, and whose copies share the inner dict."""

    def __init__(self, inner: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def keys(self) -> Any:
        return self.inner.keys()

    def values(self) -> Any:
        return self.inner.values()

    def items(self) -> Any:
        return self.inner.items()


class SelfCopyingDict(dict):  # type: ignore[type-arg]
    def __copy__(self) -> SelfCopyingDict:
        return self


class AttributeDict(dict):  # type: ignore[type-arg]
    """A well-known recipe: the items are the attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def test_a_batch_is_split_whatever_its_shape() -> None:
    """Mappings, lists and tuples of tensors, lists of as many texts; what has no samples stays whole."""
    pair = (torch.arange(8).reshape(4, 2), "text")
    batch = {"x": torch.arange(4), "pair": pair, "texts": ["a", "b", "c", "d"], "names": ["one", "two"], "scalar": torch.tensor(1)}

    part = part_of(batch, 1, 3, 4)

    assert batch_size_of(batch) == 4
    assert part["x"].tolist() == [1, 2]
    assert part["pair"][0].tolist() == [[2, 3], [4, 5]]
    assert (part["pair"][1], part["texts"], part["names"], part["scalar"].item()) == ("text", ["b", "c"], ["one", "two"], 1)


@pytest.mark.parametrize(
    "make", [FrozenMapping, EditableMapping, DelegatingDict, SelfCopyingDict, AttributeDict, OrderedDict, UserDict, MappingProxyType]
)
def test_a_mapping_keeps_its_type_and_is_not_changed(make: Any) -> None:
    """A user's own class may share its storage with its copies."""
    batch = make({"x": torch.arange(4), "nested": {"y": torch.arange(4)}, "flag": True})
    before = dict(batch.items())

    part = part_of(batch, 1, 3, 4)

    assert type(part) is make
    assert (part["x"].tolist(), part["nested"]["y"].tolist(), part["flag"]) == ([1, 2], [1, 2], True)
    assert batch.keys() == before.keys()
    assert all(batch[key] is value for key, value in before.items())
    assert batch["nested"]["y"].tolist() == [0, 1, 2, 3]


def test_a_dict_with_attribute_access_shows_the_part_by_both() -> None:
    """A copy of its attributes would still show the whole batch."""
    part = part_of(AttributeDict(x=torch.arange(4)), 1, 3, 4)

    assert part.x is part["x"]
    assert part.x.tolist() == [1, 2]


def test_a_mapping_that_cannot_be_made_from_a_dict_becomes_a_dict() -> None:
    """The batch itself stays as it is."""
    batch = KeywordMapping(inner={"x": torch.arange(4)})

    part = part_of(batch, 1, 3, 4)

    assert type(part) is dict
    assert part["x"].tolist() == [1, 2]
    assert batch["x"].tolist() == [0, 1, 2, 3]


def test_what_else_a_dict_has_is_kept() -> None:
    """A defaultdict's factory, the attributes of transformers' BatchEncoding."""
    from transformers import BatchEncoding

    lists = part_of(defaultdict(list, x=torch.arange(4)), 1, 3, 4)
    encoding = part_of(BatchEncoding({"input_ids": torch.arange(4)}, n_sequences=1), 1, 3, 4)

    assert (type(lists), lists["more"], lists["x"].tolist()) == (defaultdict, [], [1, 2])
    assert (type(encoding), encoding.n_sequences, encoding.input_ids.tolist()) == (BatchEncoding, 1, [1, 2])
    assert type(part_of(Counter(), 0, 1, 2)) is Counter


def test_a_model_output_shows_the_part_by_key_and_attribute() -> None:
    """transformers' outputs are dicts and dataclasses."""
    from transformers.modeling_outputs import BaseModelOutput

    batch = BaseModelOutput(last_hidden_state=torch.arange(4))

    part = part_of(batch, 1, 3, 4)

    assert type(part) is BaseModelOutput
    assert part.last_hidden_state is part["last_hidden_state"]
    assert part.last_hidden_state.tolist() == [1, 2]
    assert batch.last_hidden_state.tolist() == [0, 1, 2, 3]


class Pair(NamedTuple):
    x: Tensor
    label: str


class Span(NamedTuple):
    begin: int
    end: int


def test_a_named_tuple_has_fields_and_no_samples() -> None:
    """Also one with as many fields as the batch has samples."""
    part = part_of((Pair(torch.arange(2), "a"), Span(3, 4)), 0, 1, 2)

    assert part == (Pair(torch.tensor([0]), "a"), Span(3, 4))


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    ids: Tensor
    language: str = "en"


@dataclasses.dataclass
class Checked:
    x: Tensor
    scale: dataclasses.InitVar[int]
    length: int = dataclasses.field(init=False)
    mask: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.length = len(self.x)
        self.mask = self.x * scale


@dataclasses.dataclass
class Padded:
    x: Tensor

    def __post_init__(self) -> None:
        self.num_samples = len(self.x)


def test_a_dataclass_is_split_by_its_fields() -> None:
    """Frozen, with slots, with a field that is no argument, with an argument that is no field; the tensors count as samples."""
    tokens, checked = Tokens(torch.arange(4), "de"), Checked(torch.arange(4), 10)

    tokens_part, checked_part, padded_part = part_of((tokens, checked, Padded(torch.arange(4))), 1, 3, 4)

    assert num_samples(tokens) == batch_size_of(checked) == 4
    assert (type(tokens_part), tokens_part.ids.tolist(), tokens_part.language) == (Tokens, [1, 2], "de")
    assert (type(checked_part), checked_part.x.tolist(), checked_part.mask.tolist()) == (Checked, [1, 2], [10, 20])
    assert padded_part.num_samples == 2
    assert (tokens.ids.tolist(), checked.mask.tolist()) == ([0, 1, 2, 3], [0, 10, 20, 30])


class Row(list):  # type: ignore[type-arg]
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])


def test_a_list_that_cannot_be_made_from_its_elements_becomes_a_list() -> None:
    """Its class takes them one by one."""
    assert [part.tolist() for part in part_of(Row(torch.arange(4), torch.arange(4)), 1, 3, 4)] == [[1, 2], [1, 2]]


def test_the_whole_batch_as_a_part_has_containers_of_its_own() -> None:
    """What a loss function pops from its part is still in the batch; the tensors are the same."""
    batch = {"x": torch.arange(4), "labels": torch.arange(4)}

    part = part_of(batch, 0, 4, 4)
    part.pop("labels")

    assert part["x"] is batch["x"]
    assert list(batch) == ["x", "labels"]


def test_tensors_are_named_as_a_program_reads_them() -> None:
    """By key, index and field."""
    batch = {"a": [torch.zeros(1)], "b": Pair(torch.zeros(1), ""), "c": Tokens(torch.zeros(1))}

    assert [name for name, _ in named_tensors(batch)] == ["part['a'][0]", "part['b'].x", "part['c'].ids"]


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(10, 2), "y": torch.zeros(3)}, torch.zeros(0, 8), [torch.tensor(1.0)], ["text"], Tokens]
)
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: object) -> None:
    """Split by one of the sizes it would be silently wrong."""
    with pytest.raises(UsageError, match="samples"):
        num_samples(batch)
