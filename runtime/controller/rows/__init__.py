"""The life of a request: it comes, gets a row and pages, moves and ends."""
