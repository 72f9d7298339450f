"""Prefill a request when all its media are encoded: the rule of the preset ``monolithic``, for stages that work at the same time.

RServe's "gLLM-epd": encoder and language model apart, without overlap within a request.
"""

from mmrt.runtime.controller.scheduling.monolithic import Monolithic

policy = Monolithic()
