"""The controller's knowledge: requests, rows, pages, plans in flight, and the effects that it emits."""
