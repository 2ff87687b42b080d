"""The target's own choice at every node, and the walk along them."""
