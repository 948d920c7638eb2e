"""Options: a mapping becomes the class's own dataclass, or every problem is named by its path."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.options import OptionsError, read


class Kind(enum.StrEnum):
    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True)
class Inner:
    weight: float = 1.0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight: {self.weight} is negative; expected at least 0")


@dataclass(frozen=True)
class Options:
    size: int
    rate: float = 0.5
    on: bool = False
    tag: str | None = None
    mode: Literal["fast", "small", 3] = "fast"
    kind: Kind = Kind.SOFT
    pair: tuple[int, float] = (1, 2.0)
    sizes: list[int] = field(default_factory=list)
    inner: Inner = Inner()
    more: Inner | None = None
    several: dict[str, Inner] = field(default_factory=dict)
    scalars: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    anything: Any = None
    texts: Sequence[str] = field(default_factory=list)
    made: int = field(default=7, init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} must be at least 1")


def problems(values: Any, where: str = "section") -> list[str]:
    with pytest.raises(OptionsError) as caught:
        read(Options, values, where=where)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_every_kind_of_value_becomes_what_its_annotation_says() -> None:
    options = read(
        Options,
        {
            "size": 3,
            "rate": 1,
            "on": True,
            "tag": "x",
            "mode": 3,
            "kind": "hard",
            "pair": [4, 5],
            "sizes": [1, 2],
            "inner": {"weight": 2, "names": ["a"]},
            "more": {},
            "several": {"one": {"weight": 0.25}},
            "scalars": {"a": True, "b": 1, "c": 1.5, "d": "t"},
            "anything": {"deep": [1, None]},
            "texts": ["t"],
        },
        where="section",
    )
    assert options == Options(
        size=3,
        rate=1.0,
        on=True,
        tag="x",
        mode=3,
        kind=Kind.HARD,
        pair=(4, 5.0),
        sizes=[1, 2],
        inner=Inner(weight=2.0, names=("a",)),
        more=Inner(),
        several={"one": Inner(weight=0.25)},
        scalars={"a": True, "b": 1, "c": 1.5, "d": "t"},
        anything={"deep": [1, None]},
        texts=["t"],
    )
    assert type(options.rate) is float and type(options.inner.weight) is float
    kinds = {name: type(value) for name, value in options.scalars.items()}
    assert kinds == {"a": bool, "b": int, "c": float, "d": str}, "a union keeps the type that was written"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "section.size: missing; a value is required"),
        ({"size": 1, "sise": 2}, "section.sise: unknown key; did you mean 'size'?"),
        ({"size": True}, "section.size: true is not a whole number"),
        ({"size": 1.0}, "section.size: 1.0 is not a whole number"),
        ({"size": 1, "rate": "0.1"}, "section.rate: '0.1' is not a number"),
        ({"size": 1, "rate": float("nan")}, "section.rate: nan is not a finite number"),
        ({"size": 1, "on": 1}, "section.on: 1 is not true or false"),
        ({"size": 1, "tag": 5}, "section.tag: 5 is not text"),
        ({"size": 1, "mode": "3"}, "section.mode: '3' is not 'fast', 'small' or 3"),
        ({"size": 1, "kind": "softer"}, "section.kind: 'softer' is not 'soft' or 'hard'"),
        ({"size": 1, "pair": [1]}, "section.pair.1: missing; a value is required"),
        ({"size": 1, "sizes": 5}, "section.sizes: 5 is not a list"),
        ({"size": 1, "sizes": [1, None]}, "section.sizes.1: null is not a whole number"),
        ({"size": 1, "texts": "t"}, "section.texts: 't' is not a list"),
        ({"size": 1, "inner": [1]}, "section.inner: [1] is not a mapping"),
        ({"size": 1, "inner": None}, "section.inner: null is not a mapping"),
        (
            {"size": 1, "inner": {"colour": 1}},
            "section.inner.colour: unknown key; allowed here: weight, names",
        ),
        ({"size": 1, "more": {"weight": "a"}}, "section.more.weight: 'a' is not a number"),
        ({"size": 1, "more": 3}, "section.more: 3 is not a mapping"),
        ({"size": 1, "several": {"b": {"names": [3]}}}, "section.several.b.names.0: 3 is not text"),
        ({"size": 1, "scalars": {"a": [1]}}, "section.scalars.a: [1] is not true or false or a whole number"),
        ({"size": 1, "made": 3}, "section.made: unknown key"),
        ({"size": 0}, "section: size 0 must be at least 1"),
        ({"size": 1, "inner": {"weight": -1}}, "section.inner.weight: -1.0 is negative; expected at least 0"),
        ([1], "section: [1] is not a mapping"),
    ],
)
def test_a_problem_is_named_by_path_value_and_what_is_allowed(values, expected) -> None:
    [problem] = problems(values)
    assert problem.startswith(expected)


def test_all_problems_are_found_at_once() -> None:
    values = {"colour": 1, "rate": "x", "inner": {"weight": "y"}, "sizes": [1, "a", "b"]}
    assert [line.partition(": ")[0] for line in problems(values, where="a.b")] == [
        "a.b.size",
        "a.b.rate",
        "a.b.sizes.1",
        "a.b.sizes.2",
        "a.b.inner.weight",
        "a.b.colour",
    ]


def test_nothing_given_is_the_defaults() -> None:
    assert read(Inner, None, where="x") == read(Inner, {}, where="x") == Inner()


def test_a_class_that_cannot_be_options_is_the_programmers_error() -> None:
    @dataclass
    class Odd:
        when: slice

    with pytest.raises(TypeError, match="x: .*int.*not a dataclass"):
        read(int, {}, where="x")
    with pytest.raises(TypeError, match="Odd.*slice"):
        read(Odd, {"when": 1}, where="x")


@given(
    st.builds(
        Options,
        size=st.integers(1, 9),
        rate=st.floats(allow_nan=False, allow_infinity=False),
        on=st.booleans(),
        tag=st.none() | st.text(),
        sizes=st.lists(st.integers()),
        more=st.none() | st.builds(Inner, weight=st.floats(0, 9), names=st.tuples(st.text())),
        several=st.dictionaries(st.text(), st.builds(Inner)),
    )
)
def test_what_is_written_out_reads_back_the_same(options: Options) -> None:
    plain = dataclasses.asdict(options)
    del plain["made"]
    assert read(Options, plain, where="x") == options
