"""The base of every config section, and the value types they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Immutable, strictly typed, and closed: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def rejection(field: str, message: str) -> PydanticCustomError:
    """An error of one field (dotted, relative to the section), found by comparing it with others."""
    return PydanticCustomError("cross_field", "{message}", {"field": field, "message": message})


def setting(default: Any, reason: str, *, resumable: bool = False, reference: str | None = None) -> Any:
    """A field with its default and the reason for it.

    resumable: the value may differ between two invocations of the same run, because it does not
    change what kind of weights, plans or trajectories is written. reference: the kind of code that a
    `Reference` field names, a key of `references.KINDS`.
    """
    extra: dict[str, Any] = {"resumable": resumable} | ({} if reference is None else {"reference": reference})
    return Field(default, description=reason, json_schema_extra=extra)


def section(kind: type[Section], reason: str) -> Any:
    """A nested section whose own defaults apply when the key is absent."""
    return Field(default_factory=kind, description=reason)


def required(reason: str, *, resumable: bool = False) -> Any:
    """A field that every config must give."""
    return Field(..., description=reason, json_schema_extra={"resumable": resumable})


class Reference(BaseModel):
    """A value that names code: a registered name, or `module:Name` of the user's own file.

    Every other key is an option of what is named, which checks it. A name alone may be written as text.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def named(default: str) -> BeforeValidator:
    """For a `Reference` field: options without a name are those of `default`."""
    return BeforeValidator(lambda value: {"name": default, **value} if isinstance(value, Mapping) else value)
