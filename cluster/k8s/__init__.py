"""PURE. Shoal on Kubernetes through KubeRay: what the chart's values mean, and what is wrong with a manifest."""
