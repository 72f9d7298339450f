"""``overlap`` that gathers 16384 patch rows before it encodes (RServe, Figure 16: C is a quarter of that)."""

from mmrt.runtime.controller.scheduling.overlap import Overlap

policy = Overlap(gather_rows=16384)
