"""Networks, weights, tokenizers and families."""
