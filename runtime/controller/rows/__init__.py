"""How a request comes, gets a row and pages, moves and ends."""
