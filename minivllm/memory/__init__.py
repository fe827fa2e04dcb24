"""Where each token's K and V are kept: plain Python, no torch."""
