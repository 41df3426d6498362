"""Sizes as people write them, and as they read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import UsageError
from memplan.units import GIB, KIB, MIB, Size, format_bytes, parse_size

UNITS = {
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24", Size(24 * 2**30, marketing_gb=24)),
        ("0.5", Size(2**29)),
        (".5", Size(2**29)),
        ("24.", Size(24 * 2**30, marketing_gb=24)),
        ("24GiB", Size(24 * 2**30)),
        ("23.5 GiB", Size(47 * 2**29)),
        ("15835660288B", Size(15_835_660_288)),
        ("24GB", Size(24 * 10**9, marketing_gb=24)),
        ("24 g", Size(24 * 10**9, marketing_gb=24)),
        ("24000MB", Size(24 * 10**9)),
        ("  512\tmib ", Size(2**29)),
        ("1000000TiB", Size(10**6 * 2**40)),
    ],
)
def test_a_size_is_read_as_it_is_written(text: str, size: Size):
    """A plain number is GiB; GiB is 2**30 and GB is 10**9. Whole gigabytes are what stands on a box, too."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", " ", "abc", "GiB", ".", "-1", "+1", "24 XB", "24 24", "24 GiB free", "24,5", "1e3", "0x10", "nan", "inf", "1_000"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str):
    """The message repeats what was typed, the hint shows how to write it."""
    with pytest.raises(UsageError, match="is not a size") as refused:
        parse_size(text)

    assert repr(text) in refused.value.message
    assert "24GiB" in (refused.value.hint or "")


@pytest.mark.parametrize("text", ["0", "0.0", "0GiB", "0.0000000001", "0.9B"])
def test_less_than_one_byte_is_refused(text: str):
    """A GPU without memory is a slip of the hand: 1e-10 GiB is 0.1 bytes."""
    with pytest.raises(UsageError, match="less than one byte"):
        parse_size(text)


@given(
    written=st.sampled_from(sorted(UNITS)).flatmap(lambda unit: st.tuples(st.integers(1, 2**62 // UNITS[unit]), st.just(unit))),
    spaces=st.sampled_from(["", " ", "  "]),
    case=st.sampled_from([str.lower, str.upper, str]),
)
def test_a_size_is_exact_in_every_unit(written: tuple[int, str], spaces: str, case: Callable[[str], str]):
    """To the byte, with any spaces and in any case."""
    number, unit = written

    assert parse_size(f"{number}{spaces}{case(unit)}").size_bytes == number * UNITS[unit]


@given(st.integers(1, 10**6), st.sampled_from(["", ".0", ".25", ".5", ".75"]))
def test_a_plain_number_says_the_same_as_gib(whole: int, fraction: str):
    """Except that it may be the number on a box."""
    plain, exact = parse_size(f"{whole}{fraction}"), parse_size(f"{whole}{fraction}GiB")

    assert plain.size_bytes == exact.size_bytes == whole * GIB + int(float(f"0{fraction}") * GIB)
    assert (plain.marketing_gb, exact.marketing_gb) == (None if float(f"0{fraction}") else whole, None)


@given(st.integers(1, 2**62))
def test_what_is_printed_can_be_read_again(size_bytes: int):
    """Within the digits that are shown: two for GiB, one for MiB and KiB, all of a byte."""
    step = 0.01 * GIB if size_bytes >= GIB else 0.1 * MIB if size_bytes >= MIB else 0.1 * KIB if size_bytes >= KIB else 0

    read = parse_size(format_bytes(size_bytes)).size_bytes

    assert abs(read - size_bytes) <= step / 2 + size_bytes * 2**-52 + (size_bytes >= KIB)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (512 * 2**20, "512.0 MiB"),
        (2**30 - 1, "1024.0 MiB"),
        (2**30, "1.00 GiB"),
        (15_835_660_288, "14.75 GiB"),  # 15835660288 / 2**30 = 14.748
        (-3 * 2**29, "-1.50 GiB"),
        (-17, "-17 B"),
    ],
)
def test_bytes_are_printed_in_the_unit_that_suits_them(size_bytes: int, text: str):
    """Each from one of it on; what is missing has a minus."""
    assert format_bytes(size_bytes) == text


@given(st.integers(20, 400).map(lambda digits: "9" * digits))
def test_a_size_that_is_accepted_can_be_printed(text: str):
    """However many digits somebody leaned on: refused or shown, never a traceback."""
    with contextlib.suppress(UsageError):
        assert format_bytes(parse_size(text).size_bytes).endswith(" GiB")
