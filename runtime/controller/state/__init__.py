"""What the controller knows: requests, rows, pages, plans in flight, and the effects that it emits."""
