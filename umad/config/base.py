"""What every section of a recipe has in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced from other types silently, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_coercion(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1 and "5" as 5; in a recipe both are slips
        kinds = _plain_types(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and kinds & {int, float, str} and bool not in kinds:
            raise ValueError(f"expected a {'number' if kinds & {int, float} else 'text'}, not {str(value).lower()}")
        if isinstance(value, str) and kinds & {int, float} and str not in kinds:
            raise ValueError(f"expected a number, not the text {value!r}")
        return value


def _plain_types(annotation: Any) -> set[type]:
    if annotation in (int, float, str, bool):
        return {annotation}
    if getattr(annotation, "__origin__", None) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set().union(*(_plain_types(arg) for arg in get_args(annotation)), set())


PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class KeyedError(ValueError):
    """A validation failure that belongs to another key than the section it was found in."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
