"""What a KV cache costs that is full before every place is taken: how many run, and what is prefilled again.

SGLang admits a request if all that it may still take fits beside what runs and a share a of what that has still to answer, which falls to
0.098 while none is retracted. Of n that run, each with I prompt and on average H answer tokens held and as many to come (long answers are
met running more often, in the middle of their lives),

    n = (tokens - I - O) / (I + H + a H)

Answers of one length do not stay apart: too many were admitted, some are retracted, a rises and falls again within a life, and what
starts together ends together. Were all in one wave, n would be tokens / (I + O); the number was found between the two, with the wave's weight as
the prompt's share in a request.

vLLM admits what fits and preempts the newest. A request of I prompt and O answer tokens takes I when it starts, grows, and gives back I + O when it ends. While m of n end in a
step on average the n grow by m O tokens together. In a step in which k end, k (I + O) - m O tokens come free: prompts start in that
room, those that were preempted first; where it is negative, so many tokens of the newest are preempted. The memory left over is
less than a prompt, and as likely to be any share of one, so that on average neither rounds:

    tokens prefilled again for each request = E[(m O - k (I + O))^+] / m        k: Poisson, of mean m

That goes to O as m goes to 0, whatever I is: nearly all that grows between two ends is taken from the newest. Answers of one length that start in one
step end in one, and let the next start together: they were found to come in pairs (k = 2 x Poisson of m / 2) where prompts are as long as answers or
longer. Shorter prompts have grown when they are preempted, each by another length, and part; so do answers whose lengths scatter: a wave as
long as an answer keeps exp(-(2 pi c)^2 / 2) of itself, c being their coefficient of variation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsim.simulation_reference import CLIP, LEAST_RATIO

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FullMemory:
    """A KV cache of `tokens`, all numbers in tokens: of a prompt, of an answer, and of a running request, averaged over its life;
    `rows` of a decode step. output_cv2, prompt_cv2, whole_cv2: variance of answers, prompts and both together over the square of their mean."""

    tokens: float
    prompt: float
    answer: float
    context: float
    rows: float
    output_cv2: float = 0.0
    whole_cv2: float = 0.0
    prompt_cv2: float = 0.0

    @property
    def fitting(self) -> float:
        """Requests that it holds, each at its own place in its life."""
        return self.tokens / (self.context + self.rows)

    @property
    def starting(self) -> float:
        """Requests beside which one more starts if its prompt fits (vLLM), that included: 1 at least where one fits. The prompt that is waited for is longer than others, and half of a
        request's room is left over."""
        left = self.tokens - self.prompt * (1 + self.prompt_cv2)
        return max(left / (self.context + self.rows) + 0.5, min(1.0, self.fitting))

    @property
    def together(self) -> float:
        """Answers that end in one step where any does."""
        return 1 + math.exp(-2 * math.pi**2 * self.output_cv2) * min(1.0, self.prompt / self.answer)

    def again(self, ended: Array) -> Array:
        """Tokens that are prefilled again for each request, while `ended` end in a step on average."""
        clumps, chance, free = self._freed(ended)
        short = np.maximum((ended * self.answer)[..., None] - clumps * free, 0.0)
        return np.asarray((chance * short).sum(axis=-1) / ended)

    def opened(self, ended: Array) -> Array:
        """Share of steps in which prompts may start, since more comes free than grows."""
        clumps, chance, free = self._freed(ended)
        return np.asarray(1 - (chance * (clumps * free <= (ended * self.answer)[..., None])).sum(axis=-1))

    @property
    def reserved(self) -> float:
        """Requests that run at once, each at its own place in its life, where the engine keeps room for what it expects (SGLang): 1 at least
        where one fits, 0 where none does."""
        whole = self.prompt + self.answer
        if self.tokens < whole:
            return 0.0
        rest = LEAST_RATIO * min(self.context - self.prompt, CLIP)
        return max((self.tokens - whole * (1 + self.whole_cv2)) / (self.context + self.rows + rest) + 0.5, 1.0)

    @property
    def crowded(self) -> float:
        """Those of `reserved` while others wait all the time: answers of one length run in waves."""
        whole = self.prompt + self.answer
        wave = math.exp(-2 * math.pi**2 * self.output_cv2) * self.prompt / whole
        return 1 / ((1 - wave) / self.reserved + wave * whole / self.tokens) if self.reserved else 0.0

    def places(self, steps: Array, again: Array) -> Array:
        """Requests that decode at once, each for so many steps. Beside them stand what a prompt needs to start, half of it on
        average; prompts in their prefill, `again` tokens of each request for another time; and for one step what has ended."""
        passing = (self.prompt + again + self.prompt + self.answer) / steps
        return np.asarray((self.tokens - self.prompt / 2) / (self.context + self.rows + passing))

    def _freed(self, ended: Array) -> tuple[Array, Array, float]:
        """(numbers of clumps that may end in a step without freeing more than grows, (..., k) the chance of each, tokens
        that one frees)."""
        free = self.together * (self.prompt + self.answer)
        k = np.arange(int(np.max(ended) * self.answer / free) + 1, dtype=float)
        mean = (ended / self.together)[..., None]
        log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
        return k, np.exp(k * np.log(mean) - mean - log_factorial), free
