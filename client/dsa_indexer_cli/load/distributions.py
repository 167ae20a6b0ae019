"""Numbers drawn at random, as a workload file describes them."""

import math
import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Distribution(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fixed(_Distribution):
    """Always `value`."""

    kind: Literal["fixed"]
    value: int = Field(ge=0)

    @property
    def most(self) -> int:
        return self.value

    def draw(self, chance: random.Random) -> int:
        return self.value


class Uniform(_Distribution):
    """Any from `low` to `high`, both included, equally likely."""

    kind: Literal["uniform"]
    low: int = Field(ge=0)
    high: int

    @model_validator(mode="after")
    def _ordered(self) -> "Uniform":
        if self.high < self.low:
            raise ValueError(f"high {self.high} is below low {self.low}")
        return self

    @property
    def most(self) -> int:
        return self.high

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.low, self.high)


class LogNormal(_Distribution):
    """Half of them below `median`; `sigma` is of the logarithm. Cut off at `low` and `high`."""

    kind: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(gt=0, le=4)
    low: int = Field(default=1, ge=0)
    high: int

    @model_validator(mode="after")
    def _ordered(self) -> "LogNormal":
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median {self.median} is not from low {self.low} to {self.high}")
        return self

    @property
    def most(self) -> int:
        return self.high

    def draw(self, chance: random.Random) -> int:
        value = round(math.exp(chance.gauss(math.log(self.median), self.sigma)))
        return min(max(value, self.low), self.high)


class Choice(_Distribution):
    """One of `values`, by `weights`."""

    kind: Literal["choice"]
    values: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    weights: tuple[Annotated[float, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _weighted(self) -> "Choice":
        if self.weights and (len(self.weights) != len(self.values) or not sum(self.weights)):
            raise ValueError("weights: one a value, not all 0")
        return self

    @property
    def most(self) -> int:
        return max(self.values)

    def draw(self, chance: random.Random) -> int:
        return chance.choices(self.values, self.weights or None)[0]


Distribution = Annotated[Fixed | Uniform | LogNormal | Choice, Field(discriminator="kind")]
