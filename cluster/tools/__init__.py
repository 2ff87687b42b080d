"""What people run: client, command line, cluster benchmarks, manifests."""
