"""RMSNorm of rows, alone or with the addition to the residual stream before it."""

from .op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
