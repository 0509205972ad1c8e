"""How many distinct experts a batch of rows touches.

Uniform routing: each row picks k of E experts at random, so an expert is missed by R rows with probability
(1 - k/E)^R and E (1 - (1 - k/E)^R) are touched. With popularity p_e (probability that one row picks expert e):
sum_e 1 - (1 - p_e)^R. `overlap` is the share by which rows fall short of independent ones: neighbouring rows of one
sequence, and real skew, share experts more than chance would have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError

Array = NDArray[np.float64]
TABLE_ROWS = 4096  # above, skewed counts have saturated to within what a rank can tell


@dataclass(frozen=True, eq=False)
class Routing:
    """Expert popularity: uniform, Zipf with exponent `zipf`, or explicit `popularity` weights (any scale)."""

    zipf: float = 0.0
    popularity: tuple[float, ...] = ()
    overlap: Array | float = 0.0  # 0..1, a scalar or one value a parameter sample
    name: str = "uniform"

    def distinct(self, rows: Array, count: int, per_token: int) -> Array:
        """Distinct experts touched by `rows` rows: between per_token and count. Broadcasts; fractional rows allowed."""
        rows = np.asarray(rows, dtype=float)
        if not self.zipf and not self.popularity:
            touched = (
                -count * np.expm1(rows * np.log1p(-per_token / count)) if per_token < count else count * (rows > 0)
            )
        else:
            table = self._table(count, per_token, int(min(max(np.max(rows, initial=1.0), 1), TABLE_ROWS)))
            touched = np.interp(rows, np.arange(len(table)), table)
        overlap = np.asarray(self.overlap, dtype=float)
        if not np.any(overlap):
            return np.asarray(touched)
        beyond = np.maximum(touched - per_token, 0.0)  # one row always touches per_token
        return np.asarray(
            touched - overlap.reshape(overlap.shape + (1,) * (np.ndim(touched) if overlap.ndim else 0)) * beyond
        )

    def _table(self, count: int, per_token: int, rows: int) -> Array:
        if self.popularity:
            if len(self.popularity) != count:
                raise InputError(
                    f"has {len(self.popularity)} popularities, the model has {count} experts",
                    where=f"--routing {self.name}",
                    mend="give one an expert",
                )
            weight = np.asarray(self.popularity)
        else:
            weight = np.arange(1, count + 1, dtype=float) ** -self.zipf
        p = inclusion(weight, per_token)
        missed = np.exp(np.outer(np.arange(rows + 1), np.log1p(-np.minimum(p, 1 - 1e-12))))
        return np.asarray((1 - missed).sum(axis=1))


UNIFORM = Routing()
COLLAPSED = Routing(zipf=10.0, name="zipf:10")  # all rows choose the same experts, as with dummy weights
ALIKE = Routing()  # requests choose evenly, the rows of one alike: several rows read less than this predicts


def inclusion(weight: Array, k: int) -> Array:
    """Inclusion probabilities proportional to `weight`, capped at 1, that sum to k: a row picks k experts even where
    fewer than k are popular at all."""
    weight = np.asarray(weight, dtype=np.float64)
    p: Array = k * weight / weight.sum()
    for _ in range(len(weight)):
        capped = p >= 1
        if not np.any(p > 1 + 1e-12):
            break
        rest = weight[~capped].sum()
        share = weight / rest if rest > 0 else np.full(len(weight), 1 / max(int(np.sum(~capped)), 1))
        p = np.where(capped, 1.0, (k - capped.sum()) * share)
    return p


def parse(text: str) -> Routing:
    """`uniform`, `zipf:S`, or a file with one popularity an expert (a JSON list, or numbers apart by white space or commas).

    Raises InputError.
    """
    if text == "uniform":
        return UNIFORM
    if text.startswith("zipf:"):
        try:
            exponent = float(text[5:])
        except ValueError:
            exponent = float("nan")
        if not 0 <= exponent <= 10:
            raise InputError(f"{text!r} needs an exponent from 0 to 10", where="--routing", mend="for example zipf:0.8")
        return Routing(zipf=exponent, name=text)
    from specsim.files import read_text

    if not Path(text).exists():
        from specsim.errors import did_you_mean

        mend = did_you_mean(text, ("uniform", "zipf:0.8"))
        raise InputError(f"{text!r} is neither uniform, zipf:S nor a file", where="--routing", mend=mend)
    raw = read_text(Path(text), "routing file").replace("[", " ").replace("]", " ").replace(",", " ").split()
    weights = []
    for word in raw:
        try:
            weights.append(float(word))
        except ValueError:
            raise InputError(f"{word[:60]!r} is no number", where=text, mend="give one number an expert") from None
    if not weights or min(weights) < 0 or not np.all(np.isfinite(weights)) or sum(weights) <= 0:
        raise InputError(
            "popularities must be finite, not negative, and not all zero", where=text, mend="give one number an expert"
        )
    return Routing(popularity=tuple(weights), name=text)
