"""Media by URL, fetched by a process of the gateway's own."""
