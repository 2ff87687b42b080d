"""The target: weights, paged attention, aux taps, invariance."""
