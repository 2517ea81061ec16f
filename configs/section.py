"""What every section of the configuration is made of: its base, and the kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from configs.plain_values import plain, refuse_blank_text, refuse_truth_value, refuse_unwritable_text

Role = Literal["actor", "critic", "reference", "reward", "cost", "cost_critic"]
ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward", "cost", "cost_critic")

PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=1, le=31_536_000)]
"""A deadline: a shorter one cannot be kept, and a longer one than a year is none."""
SampleSeconds = Annotated[float, Field(ge=0.01, le=31_536_000)]
Options = Annotated[dict[str, Any], AfterValidator(plain)]
"""Keyword arguments: what JSON can hold."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    may_be_blank: ClassVar[frozenset[str]] = frozenset()
    """Fields whose text says something also where it is empty."""

    @field_validator("*", mode="before")
    @classmethod
    def _value_is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_unwritable_text(value)
        if info.field_name not in cls.may_be_blank:
            refuse_blank_text(value)
        refuse_truth_value(value, cls.model_fields[str(info.field_name)].annotation)
        return value
