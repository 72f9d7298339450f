"""Media of the decoders' tests."""

from mmrt.tests.media.conftest import decode_sequentially, make_audio, make_picture, make_video, processor_reference

__all__ = ["decode_sequentially", "make_audio", "make_picture", "make_video", "processor_reference"]
