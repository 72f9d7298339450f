"""What a request says: bodies, their fields by the table, conversations, media and prompts. Its text becomes a request that exists."""
