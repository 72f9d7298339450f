"""Reading of requests: bodies, fields by their table, conversations, media and prompts."""
