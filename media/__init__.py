"""Decoding and preprocessing of images, video and audio."""
