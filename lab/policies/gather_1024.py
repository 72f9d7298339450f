"""``overlap`` that gathers 1024 patch rows before it encodes (RServe, Figure 16: C is a quarter of that)."""

from mmrt.runtime.controller.scheduling.overlap import Overlap

policy = Overlap(gather_rows=1024)
