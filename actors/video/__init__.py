"""The video actor: turn images, videos and sound into patches, in a sandbox."""
