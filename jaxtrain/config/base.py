"""What every config section has in common, and the few value types they share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Immutable, strictly typed, and closed: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class Reference(BaseModel):
    """A value that names code: a registered name or `module:Name`. The other keys are that code's options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def named(default: str) -> BeforeValidator:
    """Gives a reference without a name the name `default`."""
    return BeforeValidator(lambda value: {"name": default, **value} if isinstance(value, dict) else value)


def reference(default: str, reason: str) -> Any:
    """A reference whose name is `default` where none is given."""
    return Field(default_factory=lambda: Reference(name=default), description=reason)


def rejection(field: str, message: str) -> PydanticCustomError:
    """An error of one field (dotted, relative to the section), found by comparing it with others."""
    return PydanticCustomError("cross_field", "{message}", {"field": field, "message": message})


def setting(default: Any, reason: str, *, resumable: bool = False) -> Any:
    """A field with its default and the reason for it.

    resumable: the value may differ between two invocations of the same run, because nothing already written
    (weights, plans, trajectories) would have come out differently in kind.
    """
    return Field(default, description=reason, json_schema_extra={"resumable": resumable})


def section(kind: type[Section], reason: str) -> Any:
    """A nested section whose own defaults apply when the key is absent."""
    return Field(default_factory=kind, description=reason)


def required(reason: str, *, resumable: bool = False) -> Any:
    """A field that every config must give."""
    return Field(..., description=reason, json_schema_extra={"resumable": resumable})
