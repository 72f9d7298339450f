"""The APIs: each turns a body into a request that exists, and an answer into its own form."""
