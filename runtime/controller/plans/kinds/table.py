"""All kinds of plans, by type."""

from typing import Any

from ....bus.copy_plans import Load, LoadSegments, Transfer
from ....bus.plans import Analyse, Encode, Plan, Prefill, PreprocessSegment
from .analyse import AnalyseKind
from .base import Kind
from .encode import EncodeKind
from .load import LoadKind
from .load_segments import LoadSegmentsKind
from .prefill import PrefillKind
from .preprocess import PreprocessKind
from .transfer import TransferKind

KINDS: dict[type[Plan], Kind[Any]] = {
    Analyse: AnalyseKind(),
    PreprocessSegment: PreprocessKind(),
    Encode: EncodeKind(),
    LoadSegments: LoadSegmentsKind(),
    Prefill: PrefillKind(),
    Load: LoadKind(),
    Transfer: TransferKind(),
}
