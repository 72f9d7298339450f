"""Several models behind one endpoint: the front of ``mmrt serve``, which starts and ends a run for each, and the relay that it shares
with the front of a cluster."""
