"""What becomes of a number that a line reads, as the source says it. Python says which call is running from 3.11 on."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import pytest
import torch

from memplan.child import source_lines
from memplan.child.source_lines import AskedMask, decides_branch, is_loop, is_made_whole, is_only_told, mask_asked_for, statement_text

FRAMES: list[bool] = []


def count() -> int:
    """A count that is read from the device."""
    FRAMES.append(is_only_told(_caller()))
    return 3


class Share:
    """A float of the device."""

    def item(self) -> float:
        """Read it."""
        FRAMES.append(is_made_whole(_caller()))
        return 0.5


def _caller() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    FRAMES.clear()


def _in_a_text() -> None:
    print(f"{count()} right", count() / 4)


def _summed_up() -> None:
    right, log = 0, print
    for _ in range(2):
        right += count()
    accuracy = 100 * right / 8
    log({"accuracy": accuracy})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not say which call is running")
@pytest.mark.parametrize("program", [_in_a_text, _summed_up])
def test_a_count_that_ends_in_a_text_or_a_log_is_only_told(program) -> None:
    """By itself, or in a sum and a quotient that do."""
    program()

    assert FRAMES == [True, True]


def _a_size() -> list[int]:
    return [0] * count()


def _a_size_later() -> list[int]:
    number = count()
    print(number)
    return [0] * number


def _a_size_of_its_share() -> range:
    share = count() / 4
    return range(int(share * 8))


def _a_branch() -> None:
    if count() > 2:
        print("many")


def _kept() -> list[int]:
    kept = []
    kept.append(count())
    return kept


@pytest.mark.parametrize("program", [_a_size, _a_size_later, _a_size_of_its_share, _a_branch, _kept])
def test_a_count_that_may_be_used_otherwise_is_not(program) -> None:
    """As a size, by a branch, or nobody knows where."""
    program()

    assert FRAMES == [False]


def _rounded() -> int:
    return round(Share().item())


def _rounded_later() -> int:
    share = Share().item()
    longest = share * 8
    return int(longest)


@pytest.mark.parametrize("program", [_rounded, _rounded_later])
def test_a_float_may_become_a_whole_number(program) -> None:
    """In its statement, or by the names that it has a part in."""
    program()

    assert FRAMES == [True]


def _shown() -> None:
    loss = Share().item()
    print(round(loss, 3), f"{int(loss * 100)}%")


def _rounded_to_places() -> float:
    return round(Share().item(), 4)


@pytest.mark.parametrize("program", [_shown, _rounded_to_places])
def test_a_float_that_is_rounded_to_be_shown_stays_one(program) -> None:
    """A whole number in a text is none that anything is made of."""
    program()

    assert FRAMES == [False]


def test_a_statement_over_several_lines_is_one_text() -> None:
    """A rule finds its words wherever they stand in it."""
    text = []
    if (
        text is not None
        and (text.append(statement_text(sys._getframe())) or True)
    ):  # fmt: skip
        pass

    assert text[0].startswith("if (")
    assert "statement_text" in text[0]


class Loss:
    """A float of the device, of which it is asked whether the program branches by it."""

    def item(self) -> float:
        """Read it."""
        frame = _caller()
        frames = [frame]
        while frame.f_back is not None and frame.f_back.f_code.co_filename == __file__:
            frame = frame.f_back
            frames.append(frame)
        FRAMES.append(decides_branch(frames))
        return 0.5


def _stops() -> None:
    for _ in range(2):
        if Loss().item() > 0.02:
            break


def _unfreezes() -> None:
    layer = type("Layer", (), {"requires_grad": False})
    total = 0.0
    total += Loss().item()
    if total / 3 < 0.1:
        layer.requires_grad = True


def _returned() -> float:
    losses = []
    losses.append(Loss().item())
    return sum(losses)


def _stops_by_what_is_returned() -> None:
    mean = _returned()
    while mean > 1.0:
        mean = 0.0


@pytest.mark.parametrize("program", [_stops, _unfreezes, _stops_by_what_is_returned])
def test_a_float_that_is_compared_decides_a_branch(program) -> None:
    """There, by a name that it is summed up in, or where a function returns it to."""
    program()

    assert True in FRAMES


def save(value: float) -> float:
    """Keep the best."""
    return value


def _keeps_the_best() -> None:
    best = 1.0
    loss = Loss().item()
    if loss < best:
        best = loss
        save(best)
        print("the best so far", best)
    if loss > 1e9:
        raise RuntimeError("the loss is too large")


def _only_summed_up() -> None:
    total = 0.0
    total += Loss().item()
    if FRAMES:
        print(total)


@pytest.mark.parametrize("program", [_keeps_the_best, _only_summed_up])
def test_what_is_kept_or_told_by_a_comparison_decides_no_memory(program) -> None:
    """Nor does a check that raises, nor a branch by something else."""
    program()

    assert FRAMES == [False]


ones, pair = torch.ones(2, 3, dtype=torch.bool), {"mask": torch.ones(2)}


def _by_its_method() -> None:
    if ones.all():
        return


def _of_ones() -> None:
    if not torch.all(ones == 1):
        return


def _as_a_number() -> None:
    sum([ones.all().item(), 3])


def _of_two() -> None:
    torch.empty(1 if ones.all() else 2) if ones is not None or ones[:, :2].all() else None


def _of_a_row() -> None:
    if not ones[0].all():
        return


def _of_a_dimension() -> None:
    if ones.all(dim=1).all():
        return


def _otherwise_compared() -> None:
    if (ones == 2).all() or torch.all(pair["mask"] == 1):
        return


flag = torch.ones(())


def _of_a_flag_first() -> None:
    if flag and ones.all(dim=0) is None:
        return


def _of_a_flag_beside() -> None:
    whole = torch.ones(1)
    if (whole and flag) or ones.all():
        return


def _of_a_flag_in_a_call() -> None:
    bool(flag and ones.all)


def _of_both() -> None:
    bool(ones.all() and flag)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says which call is running from 3.11 on")
@pytest.mark.parametrize(
    ("program", "asked"),
    [
        (_by_its_method, AskedMask("ones", is_for_ones=False)),
        (_of_ones, AskedMask("ones", is_for_ones=True)),
        (_as_a_number, AskedMask("ones", is_for_ones=False)),
        (_of_two, AskedMask("ones", is_for_ones=False)),
        (_of_a_row, None),
        (_of_a_dimension, None),
        (_otherwise_compared, None),
        (_of_a_flag_first, None),
        (_of_a_flag_beside, None),
        (_of_a_flag_in_a_call, None),
    ],
)
def test_what_is_asked_of_a_mask_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, program, asked: AskedMask | None) -> None:
    """Whether all of it is set, or one; of a part of it, or of what is worked out from it, nobody can say by the name."""
    found = []
    for name in ("__bool__", "item"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, method=method: (found.append(mask_asked_for(sys._getframe(1))), method(self))[1]
        )
    program()

    assert set(found) == {asked}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says which call is running from 3.11 on")
def test_what_is_read_beside_a_mask_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask first, and then a flag, in one call: the mask's answer is not that of the flag."""
    found, read = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: (found.append(mask_asked_for(sys._getframe(1))), read(self))[1])

    _of_both()

    assert found == [AskedMask("ones", is_for_ones=False), None]


def test_a_place_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over samples reads at the same instruction each time; another instruction of the same line is another place."""
    looked: list[int] = []
    around = source_lines._around
    monkeypatch.setattr(source_lines, "_around", lambda parsed, frame: (looked.append(frame.f_lasti), around(parsed, frame))[1])

    told = [(is_loop(sys._getframe()), is_loop(sys._getframe())) for _ in range(5)]

    assert told == [(False, False)] * 5
    assert len(looked) == len(set(looked)) == 2


def test_whether_a_branch_is_decided_is_looked_up_once_for_each_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation reads its loss at the same place each time; called from another one, it may be compared."""
    looked: list[int] = []
    around = source_lines._around
    monkeypatch.setattr(source_lines, "_around", lambda parsed, frame: (looked.append(frame.f_lasti), around(parsed, frame))[1])
    for _ in range(4):
        _returned()
    at_first = len(looked)

    for _ in range(2):
        _stops_by_what_is_returned()

    assert FRAMES[-1] is True
    assert FRAMES.count(False) == 4
    assert (at_first, len(looked)) == (2, 4)
