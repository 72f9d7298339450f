"""Decoding and preprocessing, beside other decoders."""
