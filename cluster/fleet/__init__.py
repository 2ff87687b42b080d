"""The Serve application: deployments, directory of drafters, router, autoscaling."""
