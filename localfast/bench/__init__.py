"""A load generator for any server that speaks OpenAI's chat protocol, so that a peer is measured by the very same code.

A work is a closed set of requests with the numbers it yields. Two servers take turns at each work, and what counts is the ratio
within one run: machines are never equally quiet twice. Talks HTTP and looks at processes from outside; knows nothing of engines.
"""

from localfast.bench.client import Sample, Target, ask, first_model
from localfast.bench.page import html_page
from localfast.bench.report import NUMBERS, Report, Row, shown, standing, verdict
from localfast.bench.turns import run
from localfast.bench.watch import machine
from localfast.bench.works import DEFAULT_WORKS, WORKS, percentile

__all__ = [
    "DEFAULT_WORKS",
    "NUMBERS",
    "WORKS",
    "Report",
    "Row",
    "Sample",
    "Target",
    "ask",
    "first_model",
    "html_page",
    "machine",
    "percentile",
    "run",
    "shown",
    "standing",
    "verdict",
]
