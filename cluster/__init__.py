"""The Ray Serve application around verifier and drafters: HTTP, placement, client and CLI."""
