"""Samples in Prometheus' text format: their labels, as a live server's counters and files of metrics have them."""

from __future__ import annotations

import re

# A set of labels; quoted values may hold braces. Not greedy across it: an exemplar behind the value has a set of its own.
LABELS = r'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
