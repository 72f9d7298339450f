"""The video actor: images, videos and sound become patches, in a sandbox."""
